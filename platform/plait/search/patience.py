"""Waiting for a study's storage that is away: a server that restarts, a disk that is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from plait.core.errors import StorageError
from plait.utils.addresses import redact

FIRST_DELAY = 0.25  # seconds before the second attempt; doubles with each
LONGEST_DELAY = 10.0
SLICE = 0.25  # seconds of waiting between two looks at whether somebody asked to stop
Result = TypeVar("Result")


def passes(error: BaseException | None) -> bool:
    """Whether an error says that the storage is away, and not that something is wrong with the request."""
    match error:
        case None:
            return False
        case OperationalError() | InterfaceError() | PoolTimeout() | OSError():
            return True
        case DBAPIError():
            return error.connection_invalidated
        case StorageInternalError() | PendingRollbackError():
            # Optuna asks once more in the transaction whose connection is lost
            return passes(error.__cause__ or error.__context__)
        case _:
            return False


class Patience:
    """Repeats what a storage could not do until it can. What is repeated must bear it.

    Args:
        say: told when the waiting begins and when it is over.
        stop: asked while waiting; True gives up.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.say = say
        self.stop = stop
        self._sleep = sleep

    def __call__(self, action: Callable[[], Result]) -> Result:
        """The result of an action that reads or writes the study.

        Raises:
            StorageError: somebody asked to stop while the storage was away.
        """
        delay, waited = FIRST_DELAY, False
        while True:
            try:
                result = action()
            except Exception as error:
                if not passes(error):
                    raise
                if not waited:
                    self.say(f"The study's storage is away ({_first_line(error)}). Waiting until it is back.")
                waited = True
                self._wait(delay, error)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                if waited:
                    self.say("The study's storage is back.")
                return result

    @contextmanager
    def holding(self, lock: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Hold a lock in the storage, which is waited for as in a call. What is done under it is done once; a
        lock that is lost by then has served.

        Raises:
            StorageError: as a call.
        """

        def take() -> AbstractContextManager[None]:
            taken = lock()
            taken.__enter__()
            return taken

        taken = self(take)
        try:
            yield
        finally:
            try:
                taken.__exit__(None, None, None)
            except Exception as error:
                if not passes(error):
                    raise

    def _wait(self, seconds: float, error: Exception) -> None:
        while seconds > 0:
            if self.stop():
                raise StorageError(
                    f"The study's storage is away: {_first_line(error)}",
                    "Without it no trial can begin or end.",
                    "The same command goes on from the last saved states when it is back.",
                ) from error
            self._sleep(min(SLICE, seconds))
            seconds -= SLICE


def _first_line(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return redact(text.splitlines()[0])
