"""`plait serve`: a search's adapters behind an endpoint with OpenAI's interface."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence

from plait.cli.generate import POOL_TOKENS, load_base
from plait.cli.parser import Parser
from plait.cli.results import store_parser, store_settings
from plait.core.errors import EXIT_DONE, ConfigError, SearchError
from plait.core.lifecycle import JobState

KEY = "PLAIT_SERVE_KEY"  # not an argument, which every user of the machine could read
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BASE = "base"
BEST = "best"


def main(arguments: Sequence[str]) -> int:
    """Serve a search's adapters with OpenAI's interface."""
    known = _parser().parse_args(arguments)
    key = os.environ.get(KEY) or None
    _check(known, key)
    address = _bound(known.host, known.port)
    from plait.tracking.results import chosen, load_search
    from plait.tracking.trained import adapter_folder, base_model

    settings = store_settings(known)
    search = load_search(settings, known.name)
    records = [record for record in search.records if record.state == JobState.FINISHED]
    if known.trial:
        records = [chosen(search, trial) for trial in dict.fromkeys(known.trial)]
    if not records:
        raise SearchError(f"search {search.name!r} has no finished trial", "Only these have an adapter.")
    folders = {record.name: adapter_folder(search, record, settings) for record in records}
    base, adapters = load_base(base_model(search, settings), folders)
    models: dict[str, str | None] = {BASE: None} | {name: name for name in folders}
    if search.best is not None and search.best.name in folders:
        models[BEST] = search.best.name
    from plait.serve.driver import Driver
    from plait.serve.engine import Engine
    from plait.serve.folders import HOST_BYTES
    from plait.serve.server import Endpoint, Limits, make_app, run

    limits = Limits(new_tokens=known.max_new_tokens, waiting=known.queue)
    engine = Engine(base, adapters, pool_tokens=known.pool_tokens, host_bytes=HOST_BYTES)
    driver = Driver(engine, most_waiting=limits.waiting)
    endpoint = Endpoint(driver, base, models, limits)
    app = make_app(endpoint, driver, key=key, limits=limits, local=known.host in LOOPBACK)
    print(f"http://{known.host}:{known.port}/v1 serves {', '.join(models)}; Ctrl-C stops it.", flush=True)
    run(app, address)
    return EXIT_DONE


def _parser() -> Parser:
    parser = store_parser("serve", "Serve a search's adapters with OpenAI's interface.")
    add = parser.add_argument
    parser.epilog = f"{KEY} in the environment is the API key that clients must send."
    add("name", nargs="?", help="name of the search; default: the newest")
    add("--trial", type=int, action="append", metavar="N", help="may be repeated; default: all finished")
    add("--host", default="127.0.0.1", help=f"address; others than this machine's own need {KEY}")
    add("--port", type=int, default=8000, help="default: 8000")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="most of a request; default: 1024")
    add("--queue", type=int, default=256, metavar="N", help="requests that may wait; default: 256")
    add("--pool-tokens", type=int, default=POOL_TOKENS, metavar="N", help="tokens of all running requests")
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
    for name, least, most in (
        ("port", 1, 65535),
        ("max_new_tokens", 1, None),
        ("queue", 1, None),
        ("pool_tokens", 1, None),
    ):
        value = getattr(known, name)
        if value < least or (most is not None and value > most):
            rule = f"It must be at least {least}" + (f" and at most {most}." if most else ".")
            raise ConfigError(f"--{name.replace('_', '-')} {value}", rule)
