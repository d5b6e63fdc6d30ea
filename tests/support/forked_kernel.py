"""A notebook's kernel, forked from a process that has imported everything: imports take longest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from forked import FORKS, HANGS
from jupyter_client.provisioning.local_provisioner import LocalProvisioner


def _serve(words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=list(words))


class ForkedKernel:
    """The part of ``Popen`` that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        self._process: Any = FORKS.Process(target=_serve, args=(list(words), folder, dict(environment)))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self) -> int | None:
        self._process.join(HANGS)
        return self._process.exitcode  # type: ignore[no-any-return]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


async def launch_kernel(self: LocalProvisioner, cmd: Sequence[str], **options: Any) -> Any:
    """In place of ``LocalProvisioner.launch_kernel``. It has no process group of its own: what is sent to
    one would reach all tests."""
    words = cmd[cmd.index("ipykernel_launcher") + 1 :]
    self.process = ForkedKernel(words, str(options["cwd"]), options["env"])
    self.pid, self.pgid = self.process.pid, None
    return self.connection_info
