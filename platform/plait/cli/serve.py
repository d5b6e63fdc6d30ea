"""`plait serve`: adapters of a search or of folders behind an endpoint with OpenAI's interface."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from plait.cli.generate import BASE, POOL_TOKENS, fetched_adapters, load_base
from plait.cli.parser import Parser, check_least
from plait.cli.results import READING, store_parser, store_settings
from plait.core.errors import EXIT_DONE, ConfigError, StorageError, choices
from plait.core.settings import WHOLE
from plait.utils.paths import as_path
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.core.settings import ModelSettings

Found = TypeVar("Found")
KEY = "PLAIT_SERVE_KEY"  # not an argument, which every user of the machine could read
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CONFIG = "adapter_config.json"  # of an adapter's folder
SHOWN = 20  # names that are printed
BEST = "best"
MOST_PORT = 65535


@dataclass(slots=True)
class _Served:
    """What is served: a base model, its chat template if the search has one of its own, adapters by name, and
    other names of theirs."""

    model: ModelSettings | None = None
    template: str | None = None
    folders: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str | None] = field(default_factory=lambda: {BASE: None})


def main(arguments: Sequence[str]) -> int:
    """Serve adapters with OpenAI's interface."""
    known = _parser().parse_args(arguments)
    key = os.environ.get(KEY) or None
    _check(known, key)
    folders = _given_folders(known)
    of_search = bool(known.names) or not (folders or known.adapters)
    _check_meant(known, of_search)
    address = _bound(known.host, known.port)
    served = _of_search(known) if of_search else _Served()
    for name, folder in folders.items():
        if name in served.folders or name in served.aliases:
            raise ConfigError(f"{folder}", f"There is another model named {name!r}.", "Rename the folder.")
        served.folders[name] = folder
    if len(served.folders) > known.max_adapters:
        raise ConfigError(
            f"{len(served.folders)} adapters",
            f"--max-adapters is {known.max_adapters}.",
            "Raise --max-adapters.",
        )
    model = served.model or _base_of(known, folders)
    base, adapters = load_base(model, served.folders, most=known.max_adapters, template=served.template)
    served.aliases = {name: own for name, own in served.aliases.items() if own in (None, *adapters.names)}
    from plait.engine.devices import free_bytes
    from plait.serve.driver import Driver
    from plait.serve.engine import Engine
    from plait.serve.folders import HOST_BYTES
    from plait.serve.server import Endpoint, Models, make_app, run

    engine = Engine(
        base,
        adapters,
        pool_tokens=known.pool_tokens,
        host_bytes=HOST_BYTES,
        reserve=free_bytes(),
    )
    driver = Driver(engine, most_waiting=known.queue, most_seconds=known.wait)
    models = Models(served.aliases, adapters, known.adapters)
    endpoint = Endpoint(driver, base, models, known.max_new_tokens)
    app = make_app(endpoint, driver, key=key, local=known.host in LOOPBACK)
    shown = ", ".join(models.names[:SHOWN]) + (
        f" and {len(models.names) - SHOWN} more" * (len(models.names) > SHOWN)
    )
    shown_host = f"[{known.host}]" if ":" in known.host else known.host
    print(f"http://{shown_host}:{known.port}/v1 serves {shown}; Ctrl-C stops it.", flush=True)
    run(app, address, driver)
    return EXIT_DONE


def _named(text: str) -> Path:
    """The path of an argument. ./x is a folder, as typed, and never the name of a search."""
    path = as_path(text)
    return path.absolute() if text.startswith(f".{os.sep}") else path


def _given_folders(known: argparse.Namespace) -> dict[str, Path]:
    """The adapters' folders among the arguments and below --adapters by name; the other arguments stay.

    Raises:
        ConfigError: two have one name, or there is more than one search.
    """
    folders = [path for path in known.what if (path / CONFIG).is_file()]
    known.names = [str(path) for path in known.what if path not in folders]
    for name in known.names:
        if name.startswith((os.sep, f"..{os.sep}")):
            raise ConfigError(
                f"plait serve {name}",
                f"This is not a folder that contains {CONFIG}.",
                "Give an adapter's folder.",
            )
    if len(known.names) > 1:
        raise ConfigError(
            f"plait serve {' '.join(known.names)}",
            f"One search can be served, and folders of adapters, which contain {CONFIG}.",
        )
    if known.adapters is not None:
        if not known.adapters.is_dir():
            raise ConfigError(
                f"--adapters {known.adapters}", "It must be a folder that contains adapters' folders."
            )
        folders += sorted(file.parent for file in known.adapters.glob(f"*/{CONFIG}"))
    found: dict[str, Path] = {}
    for folder in folders:
        name = folder.name if folder.name not in ("", "..") else folder.resolve().name
        if name in found:
            raise ConfigError(f"{folder}", f"There is another folder named {name}.", "Rename one of them.")
        found[name] = folder
    return found


def _check_meant(known: argparse.Namespace, of_search: bool) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: --model with a search, or --trial without one.
    """
    if of_search and known.model is not None:
        raise ConfigError(f"--model {known.model}", "A search's adapters are served on its own base model.")
    if not of_search and known.trial:
        raise ConfigError(f"--trial {known.trial[0]}", "It chooses among a search's trials; name the search.")


def _base_of(known: argparse.Namespace, folders: Mapping[str, Path]) -> ModelSettings:
    """The base model that folders of adapters name, or that of --model.

    Raises:
        ConfigError: there is none, or they name different ones.
    """
    from plait.adapters.facts import quantised_base
    from plait.models.load import named_model

    modes = {_readable(quantised_base, folder) for folder in folders.values()} - {None}
    if len(modes) > 1:
        raise ConfigError(
            f"base models quantised as {choices(sorted(map(str, modes)))}",
            "All adapters of a server run on one base model, as each was trained.",
            "Serve them separately.",
        )
    quantise = next((mode for mode in modes if mode is not None), WHOLE)
    if known.model is not None:
        return named_model(known.model, quantise=quantise)
    named = {pair for folder in folders.values() if (pair := _readable(_named_base, folder)) is not None}
    if not named and folders:
        _named_base(next(iter(folders.values())))  # says why
    if len(named) != 1:
        raise ConfigError(
            f"base models: {choices(sorted(name for name, _ in named)) or 'none'}",
            "All adapters of a server belong to one base model.",
            "Name it with --model.",
        )
    return named_model(*named.pop(), quantise)


def _named_base(folder: Path) -> tuple[str, str | None]:
    """Name and revision of the base model that an adapter's folder names."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return str(config["base_model_name_or_path"]), config.get("revision")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{folder / CONFIG}: {error}", "It must name the adapter's base model.") from error


def _readable(read: Callable[[Path], Found], folder: Path) -> Found | None:
    """What a folder says; None if it cannot be read, which is said when its adapter is loaded."""
    try:
        return read(folder)
    except StorageError:
        return None


def _of_search(known: argparse.Namespace) -> _Served:
    """The finished trials of a search, or those that are named."""
    say(READING)
    from plait.tracking.results import load_search, trained
    from plait.tracking.trained import base_model, own_template, recorded_config

    settings = store_settings(known)
    search = load_search(settings, known.names[0] if known.names else None)
    records = trained(search, known.trial)
    served = _Served(base_model(search, settings), own_template(recorded_config(search, settings)))
    served.folders |= fetched_adapters(search, records, settings)
    if search.best is not None and search.best.name in served.folders:
        served.aliases[BEST] = search.best.name
    return served


def _parser() -> Parser:
    parser = store_parser("serve", "Serve adapters with an OpenAI-compatible API; each is a model.")
    add = parser.add_argument
    parser.epilog = f"{KEY} in the environment is the API key that clients must send."
    add(
        "what",
        nargs="*",
        type=_named,
        metavar="NAME | FOLDER",
        help="a search, and adapters' folders in PEFT's format; default: the newest search",
    )
    add(
        "--adapters",
        type=as_path,
        metavar="FOLDER",
        help="serve all adapters in this folder; clients may add others",
    )
    add("--model", metavar="NAME", help="base model of folders; default: the one that they name")
    add(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest time that a request waits for room; default: 60",
    )
    parser.add_trials()
    add(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on; one that other machines reach needs {KEY}",
    )
    add("--port", type=int, default=8000, help="default: 8000")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="longest answer; default: 1024")
    add("--max-adapters", type=int, default=4096, metavar="N", help="most adapters at once; default: 4096")
    add("--queue", type=int, default=256, metavar="N", help="requests that may wait; default: 256")
    add(
        "--pool-tokens",
        type=int,
        default=POOL_TOKENS,
        metavar="N",
        help="most tokens of all running requests",
    )
    return parser


def _bound(host: str, port: int) -> socket.socket:
    """The address, taken before anything is loaded.

    Raises:
        ConfigError: another program has it, or it is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just ended is no obstacle
    try:
        bound.bind((host, port))
        bound.listen()  # else a second program could bind it, too; clients that come early wait
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}",
            "The server needs an address of this machine that no other program uses.",
            "Choose another --port.",
        ) from error
    return bound


def _check(known: argparse.Namespace, key: str | None) -> None:
    """Refuse bad options before anything is loaded."""
    if known.host not in LOOPBACK and key is None:
        raise ConfigError(
            f"--host {known.host}",
            "An address that other machines reach needs an API key.",
            f"Set {KEY}, or leave --host out.",
        )
    if key is not None and not re.fullmatch("[!-~]([ -~]*[!-~])?", key):
        raise ConfigError(
            f"{KEY}, whose value is not shown here",
            "A key is sent in a header: ASCII letters, digits and signs, without a space at its ends.",
            "Choose another key.",
        )
    check_least(known, port=1, max_new_tokens=1, max_adapters=1, queue=1, pool_tokens=1, wait=0)
    if known.port > MOST_PORT:
        raise ConfigError(f"--port {known.port}", f"It must be at most {MOST_PORT}.")
