"""What `plait sweep --help` says of each key: the comment beside it in conf/.

A seam: loaded only for help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.utils.paths import conf_dir

COLUMN = 44  # where comments begin, beside short values
_KEY = re.compile(r"( *)([\w-]+):(?: |$)")
_COMMENT = re.compile(r" +# (.+)$")


def with_comments(text: str) -> str:
    """A configuration as YAML, with a comment beside each key that conf/ explains."""
    comments = dict(reversed([*_comments()]))  # the first of several files
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        if found := _KEY.match(line):
            path[len(found[1]) // 2 :] = [found[2]]
            said = comments.get(".".join(path))
            line = f"{line:<{COLUMN}}  # {said}" if said else line
        lines.append(line)
    return "\n".join([*lines, ""])


def _comments() -> Iterator[tuple[str, str]]:
    """Keys of conf/ and the comments beside them, those of the files that are chosen by default first."""
    chosen = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    files = sorted(conf_dir().rglob("*.yaml"))
    for file in sorted(files, key=lambda each: f"{each.parent.name}: {each.stem}\n" not in chosen):
        path = [*file.parent.relative_to(conf_dir()).parts]
        depth = len(path)
        for line in file.read_text(encoding="utf-8").splitlines():
            if found := _KEY.match(line):
                path[depth + len(found[1]) // 2 :] = [found[2]]
                if comment := _COMMENT.search(line):
                    yield ".".join(path), comment[1]
