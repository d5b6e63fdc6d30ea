"""The command that started a search, kept in its folder so that `plait resume NAME` needs no arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.config.build import key_of
from plait.core.errors import StorageError
from plait.utils.files import OWNER_ONLY, disk_errors, write_text
from plait.utils.paths import begun_name, no_such_search, search_folder, search_names

FILE = "command.json"
URI = "tracking.uri"
ROOT = "tracking.root"
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
    """The command of a search below ``root``; None if the search does not exist, or if its file cannot be
    read: for those who write it again or can do without it."""
    with suppress(StorageError):
        return read_command(root, name)
    return None


def read_command(root: Path, name: str) -> RecordedCommand | None:
    """The command of a search below ``root``; None if none was stored.

    Raises:
        StorageError: its file is damaged or may not be read.
    """
    path = search_folder(root, name) / FILE
    rule = "It holds the command that started the search."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RecordedCommand(**content | {"arguments": tuple(content["arguments"])})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror}", rule, "Only the user who started it can read it."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Give the `plait sweep` command again: it resumes the search and writes the file again."
        raise StorageError(f"{path}: the file is damaged", rule, remedy) from error


def known_command(root: Path, name: str) -> RecordedCommand:
    """The command of a search below ``root``, by its name or an unambiguous beginning of it.

    Raises:
        SearchError: the search does not exist; the message lists those that do.
        StorageError: as :func:`read_command`.
    """
    whole = begun_name(name, _with_command(root))
    if (found := read_command(root, whole)) is None:
        raise no_such_search(name, root, _with_command(root))
    return found


def recorded_commands(root: Path) -> list[RecordedCommand]:
    """The commands of all searches below ``root`` that can be read, by name."""
    read = (recorded_command(root, name) for name in _with_command(root))
    return [command for command in read if command is not None]


def unreadable_commands(root: Path) -> list[Path]:
    """The files below ``root`` that should hold a command, and are damaged or may not be read, by name."""
    unread = (name for name in _with_command(root) if recorded_command(root, name) is None)
    return [search_folder(root, name) / FILE for name in unread]


def _with_command(root: Path) -> list[str]:
    return [name for name in search_names(root) if (search_folder(root, name) / FILE).exists()]
