"""The command that started a search, kept in its folder so that `plait resume NAME` needs no arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.config.build import key_of
from plait.core.errors import SearchError
from plait.utils.files import OWNER_ONLY, disk_errors, write_text
from plait.utils.paths import begun_name, search_folder

FILE = "command.json"
URI = "tracking.uri"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")  # needs no quotes in Hydra or in a shell
_WORDS = ("true", "false", "null", "nan", "inf", "infinity")  # Hydra reads these as other types


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """The last command that trained a search.

    Attributes:
        arguments: Hydra's overrides, as given.
        directory: the current folder, to which relative paths refer.
        finished: whether the search has finished.
        store: address of the MLflow store, however it was given; None: in the folder of the runs.
        storage: the study's storage, independent of the current folder; None: the journal in the folder of
            the runs.
        concluded: whether the search's run in the store has everything of the finished search.
    """

    name: str
    verb: str
    arguments: tuple[str, ...]
    directory: str
    finished: bool = False
    store: str | None = None
    storage: str | None = None
    concluded: bool = False

    def words(self, more: Sequence[str] = ()) -> list[str]:
        """The resuming command: without ``fresh``, with its own name, in its own store whatever the
        environment says now, and with new overrides replacing earlier ones."""
        if self.store and URI not in map(key_of, (*self.arguments, *more)):
            more = [*more, f"{URI}={quoted(self.store)}"]
        changed = {key_of(argument) for argument in more} | {"search.fresh", "search.name"}
        kept = [argument for argument in self.arguments if key_of(argument) not in changed]
        return [self.verb, *kept, *more, f"search.name={quoted(self.name)}"]


def given(arguments: Sequence[str], key: str) -> str:
    """The last value that overrides give to a key, without the quotes around it; "" if there is none."""
    values = [each.partition("=")[2] for each in arguments if key_of(each) == key]
    return values[-1].strip("'\"") if values else ""


def quoted(text: str) -> str:
    """Any text, quoted as the value of a Hydra override."""
    from hydra.core.override_parser.types import Quote, QuotedString  # takes most of a second to load

    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else QuotedString(text, Quote.single).with_quotes()


def write_command(folder: Path, command: RecordedCommand) -> None:
    """Store a command in a search's folder. Only the user who started it may read it, because it is stored as
    given, including the password in a database's address, which is kept nowhere else.

    Raises:
        StorageError: the folder cannot be written.
    """
    rule = "Plait stores there what it needs to resume the search."
    with disk_errors(folder, rule, "Free some space, or choose another folder with tracking.root=FOLDER."):
        write_text(folder / FILE, json.dumps(asdict(command), indent=2), mode=OWNER_ONLY)


def recorded_command(root: Path, name: str) -> RecordedCommand | None:
    """The command of a search below ``root``; None if the search does not exist."""
    return _read(search_folder(root, name) / FILE)


def known_command(root: Path, name: str) -> RecordedCommand:
    """The command of a search below ``root``, by its name or an unambiguous beginning of it.

    Raises:
        SearchError: the search does not exist; the message lists those that do.
    """
    found = recorded_command(root, name)
    if found is None:
        whole = begun_name(name, (command.name for command in recorded_commands(root)))
        found = recorded_command(root, whole)
    if found is None:
        raise SearchError(f"{name!r}: no such search in {root}", *_what_there_is(root))
    return found


def recorded_commands(root: Path) -> list[RecordedCommand]:
    """The commands of all searches below ``root``, by name."""
    read = (_read(path) for path in search_folder(root, "x").parent.glob(f"*/{FILE}"))
    return sorted((command for command in read if command is not None), key=lambda command: command.name)


def _what_there_is(root: Path) -> tuple[str, str]:
    commands = recorded_commands(root)
    if not commands:
        return "This folder contains no searches.", "Set the folder with tracking.root=FOLDER."
    unfinished = [command.name for command in commands if not command.finished]
    lines = [f"Unfinished: {', '.join(unfinished) or 'none'}."]
    if finished := [command.name for command in commands if command.finished]:
        lines.append(f"Finished: {', '.join(finished)}.")
    return "\n".join(lines), "Use one of these names, or set the folder with tracking.root=FOLDER."


def _read(path: Path) -> RecordedCommand | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RecordedCommand(**content | {"arguments": tuple(content["arguments"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
