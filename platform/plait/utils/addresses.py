"""Addresses of databases and servers: with the driver that is installed, and without secrets in print."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from urllib.parse import urlsplit

from plait.core.errors import StorageError

HIDDEN = "***"
SERVERS = ("http", "https")
LONGEST = 200  # characters of a password with blanks, and of a name in a query
# What follows :// in a text, up to a blank, or a quote that closes the address.
_REST = re.compile(r"""(?:[^\s"'<>]|["'](?=["']{0,8}[^\s"'<>,;)\]}]))*""")
_SCHEME = re.compile(r"[\w+.-]*\Z")
_BLANK_IN_PASSWORD = re.compile(
    rf"""(://[^\s/:@'"]+):(?!\d{{1,5}}(?:[/?#\s]|$))(?=\S)[^@\n'"]{{1,{LONGEST}}}@(?=[\w.\[-])"""
)
_IN_QUERY = re.compile(
    r"([?&][\w-]{0,40}(?:passw|pwd|token|secret|api_?key|credential|signature)[\w-]{0,40}=)"
    r"""(?:[^\s"'<>&]|["'](?=["']{0,8}[^\s"'<>,;)\]}]))+""",
    re.I,
)


def with_driver(url: str) -> str:
    """A PostgreSQL URL that names its driver, if it names none.

    SQLAlchemy 2.1 takes psycopg 3 for a bare "postgresql", 2.0 takes psycopg2: the one that is installed
    is the one that is meant.
    """
    scheme, mark, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    drivers = [name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name) is not None]
    return f"postgresql+{drivers[0]}{mark}{rest}" if drivers else f"postgresql{mark}{rest}"


def check_login(key: str, url: str) -> None:
    """Refuse an address, the value of ``key``, of which a client would take a part of the password for the
    host, and show it.

    Raises:
        StorageError: the login holds characters that end it.
    """
    if _ambiguous(url):
        raise StorageError(
            f"{key}={redact(url)}",
            "It is unclear where the password ends and the host begins.",
            "Write / as %2F, @ as %40, ? as %3F, # as %23 and a blank as %20 in user name and password.",
        )


def _ambiguous(url: str) -> bool:
    """Whether the login holds characters that end it for a client, so that a part of the password
    would be taken for the host. They are to be written as %XX."""
    head = url.partition("?")[0]
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all, as its client says
        return False
    if parts.scheme not in SERVERS:
        return "://" in url and parts.netloc != "" and head.count("@") > 1
    return " " in head or ("@" not in parts.netloc and redact(head) != head)


def redact(text: str) -> str:
    """The text without the secrets of the addresses in it: passwords before the host or in the query, and for
    a server a lone user name, which is a token. In doubt, it is hidden."""
    text = _BLANK_IN_PASSWORD.sub(
        lambda found: f"{found[1]}:{HIDDEN}@" if re.search(r"\s", found[0]) else found[0], text
    )
    pieces, done = [], 0
    marks = [found.start() for found in re.finditer("://(?!/)", text)]
    for mark, following in pairwise([*marks, len(text)]):
        if mark + 3 > following or mark < done:
            continue
        end = following - len(_scheme(text, following)) if following < len(text) else following
        rest = _REST.match(text, mark + 3, max(end, mark + 3))
        assert rest is not None
        pieces += [text[done : mark + 3], _without_login(_scheme(text, mark), rest[0])]
        done = rest.end()
    return _IN_QUERY.sub(rf"\1{HIDDEN}", "".join([*pieces, text[done:]]))


def _scheme(text: str, mark: int) -> str:
    """What stands before the :// at a position."""
    found = _SCHEME.search(text[max(mark - 24, 0) : mark])
    return found[0] if found else ""


def first_line(error: BaseException | None) -> str:
    """What an error says, in one line and without secrets; "" without one."""
    return "" if error is None else redact(str(error).strip().partition("\n")[0])


def _without_login(scheme: str, rest: str) -> str:
    """An address, without its scheme and ://, with its login hidden."""
    head = rest.partition("?")[0]
    login, at, _ = (head if "@" in head else rest).rpartition("@")
    user, colon, password = login.partition(":")
    server = scheme.lower() in SERVERS
    if not at or set(user) & set("/?#") or (server and re.match(r"\d{1,5}[/?#]", password)):
        return rest  # what stands before the @ is a path
    if not colon and not server:
        return rest  # a database's user without a password
    token = server and password in ("", "x-oauth-basic")
    return f"{HIDDEN if token else f'{user}:{HIDDEN}'}@{rest[len(login) + 1 :]}"
