"""Addresses of databases and servers: adding the installed driver, hiding secrets, finding other programs'
data."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, urlsplit

from plait.core.errors import StorageError

HIDDEN = "***"
SERVERS = ("http", "https")
SHOWN_TABLES = 5
LONGEST = 200  # most characters of a password with blanks, and of a name in a query
# The rest of an address after ://, up to a blank, or a quote that closes the address.
_REST = re.compile(r"""(?:[^\s"'<>]|["'](?=["']{0,8}[^\s"'<>,;)\]}]))*""")
_SCHEME = re.compile(r"[\w+.-]*\Z")
_BLANK_IN_PASSWORD = re.compile(
    rf"""(://[^\s/:@'"]+):(?!\d{{1,5}}(?:[/?#\s]|$))(?=\S)[^@\n'"]{{1,{LONGEST}}}@(?=[\w.\[-])"""
)
_FOLDED = re.compile(r"""(?<=[a-z]:/)[^\s/@'"][^\s'"]*@""", re.I)  # an address that was taken for a path
_IN_QUERY = re.compile(
    r"([?&][\w-]{0,40}(?:passw|pwd|token|secret|api_?key|credential|signature)[\w-]{0,40}="
    r"|[?&](?:[\w-]{0,40}[_-])?(?:pw|key|auth|sig)=)"
    r"""(?:[^\s"'<>&]|["'](?=["']{0,8}[^\s"'<>,;)\]}]))+""",
    re.I,
)

_POOL = re.compile(r"HTTPS?ConnectionPool\(host='([^']*)', port=(\d+)\)")  # in the text of urllib3's errors
_FRAGMENT = re.compile(r"""(https?://[^\s"'<>#]{1,2000}#)[^\s"'<>]+""", re.I)


def with_driver(url: str) -> str:
    """The URL, with the installed driver added if it is a PostgreSQL URL that names none.

    For a bare "postgresql", SQLAlchemy 2.1 uses psycopg 3 and 2.0 uses psycopg2; the installed one is
    meant.
    """
    scheme, mark, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    drivers = [name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name) is not None]
    return f"postgresql+{drivers[0]}{mark}{rest}" if drivers else f"postgresql{mark}{rest}"


def foreign_tables(file: Path, *own: str) -> str:
    """Some tables of a SQLite file, if it has tables and none of ``own``, so that it is another program's;
    else ""."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return ""  # who uses it reports what is wrong with it
    found = {name for (name,) in rows}
    return "" if found & {*own} else ", ".join(sorted(found)[:SHOWN_TABLES])


BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT")
DISK = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY")


def sqlite_fault(error: BaseException, named: str, holds: str, other: str) -> StorageError | None:
    """What is wrong with a SQLite file, where an error says that; None for other errors.

    Args:
        named: the file with its key, KEY=FILE.
        holds: what is in it, as a sentence.
        other: the setting that names another file.
    """
    if damage := sqlite_says(error, DAMAGED):
        remedy = "Put back a copy of it. Without one, move it away: then a new one is begun."
        return StorageError(f"{named}: the file is damaged ({damage})", holds, remedy)
    if says := sqlite_says(error, BUSY):
        return StorageError(
            f"{named}: {says}", holds, f"Wait until no other program has it locked, or set {other}."
        )
    if says := sqlite_says(error, DISK):
        remedy = f"Free some space and make file and folder writable, or set {other}."
        return StorageError(f"{named}: {says}", holds, remedy)
    return None


def sqlite_says(error: BaseException | None, kinds: tuple[str, ...]) -> str:
    """What SQLite says in an error of these kinds, which libraries wrap in theirs; "" for other errors."""
    if error is None:
        return ""
    inner = error if isinstance(error, sqlite3.Error) else getattr(error, "orig", None)
    if getattr(inner, "sqlite_errorname", "").startswith(kinds):
        return str(inner)
    return sqlite_says(error.__cause__ or error.__context__, kinds)


NOT_NOW = (  # what PostgreSQL, or a pool of connections before it, says while it may answer later
    *("the database system is", "too many", "connection slots", "terminating connection"),
    *("timeout", "cannot connect to server", "try again", "out of memory", "could not fork"),
)


def server_refuses(error: BaseException) -> bool:
    """Whether PostgreSQL answers and lets this user in no more, which waiting does not cure; while it starts
    or ends, or has no connection free, it may later."""
    text = str(error)
    return "FATAL:" in text and not any(each in text for each in NOT_NOW)


def check_login(key: str, url: str) -> None:
    """Refuse an address, the value of ``key``, if a client would take part of its password for the host and
    show it.

    Raises:
        StorageError: the login has characters at which a client would end it.
    """
    if _ambiguous(url):
        raise StorageError(
            f"{key}={redact(url)}",
            "It is unclear where the password ends and the host begins.",
            "Write / as %2F, @ as %40, ? as %3F, # as %23 and a space as %20 in user name and password.",
        )


def _ambiguous(url: str) -> bool:
    """Whether the login has characters at which a client would end it, taking the rest of the password for
    the host. They must be written as %XX."""
    head = url.partition("?")[0]
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all, as its client says
        return False
    if parts.scheme not in SERVERS:
        return "://" in url and parts.netloc != "" and head.count("@") > 1
    return " " in head or ("@" not in parts.netloc and redact(head) != head)


def redact(text: str) -> str:
    """The text with the secrets of its addresses hidden: passwords before the host or in the query and, for a
    server, a user name alone, which is a token. If in doubt, it hides."""
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
    found = _IN_QUERY.sub(rf"\1{HIDDEN}", "".join([*pieces, text[done:]]))
    found = _FRAGMENT.sub(rf"\1{HIDDEN}", found)
    return _FOLDED.sub(f"{HIDDEN}@", found)


def _scheme(text: str, mark: int) -> str:
    """The scheme before the :// at a position."""
    found = _SCHEME.search(text[max(mark - 24, 0) : mark])
    return found[0] if found else ""


def first_line(error: BaseException | None) -> str:
    """An error's message in one line, without secrets; "" if there is no error. Of requests to a server that
    failed only its address and how the last one failed, where its client tells of each layer."""
    if error is None:
        return ""
    if (pool := _POOL.search(str(error))) is None:
        return redact(str(error).strip().partition("\n")[0]) or type(error).__name__
    inner = error
    while (below := inner.__cause__ or inner.__context__) is not None:
        inner = below
    how = getattr(inner, "strerror", None) or str(inner).partition("\n")[0] or type(inner).__name__
    return redact(f"{pool[1]}:{pool[2]}: {how}")


def _without_login(scheme: str, rest: str) -> str:
    """The part of an address after its scheme and ://, with the login hidden."""
    head = rest.partition("?")[0]
    login, at, _ = (head if "@" in head else rest).rpartition("@")
    user, colon, password = login.partition(":")
    server = scheme.lower() in SERVERS
    if not at or set(user) & set("/?#") or (server and re.match(r"\d{1,5}[/?#]", password)):
        return rest  # the part before the @ is a path
    if not colon and not server:
        return rest  # a database's user without a password
    token = server and password in ("", "x-oauth-basic")
    return f"{HIDDEN if token else f'{user}:{HIDDEN}'}@{rest[len(login) + 1 :]}"
