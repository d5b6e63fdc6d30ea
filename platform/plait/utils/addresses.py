"""Addresses of databases and servers: with the driver that is installed, and without secrets in print."""

from __future__ import annotations

import importlib.util
import re
from urllib.parse import urlsplit

HIDDEN = "***"
SERVERS = ("http", "https")
# A character of an address within a text: no blank, no quote that closes it, no start of another address.
_PART = r"""(?:(?![A-Za-z][\w+.-]*://|://)[^\s"'<>]|["'](?=["']*[^\s"'<>,;)\]}]))"""
_ADDRESS = re.compile(rf"([A-Za-z][\w+.-]*)://(?!/)({_PART}*)")
_BLANK_IN_PASSWORD = re.compile(
    r"(://[^\s/:@'\"]+):(?!\d{1,5}(?:[/?#\s]|$))(?=\S)[^@\n'\"]*\s[^@\n'\"]*@(?=[\w.\[-])"
)
_IN_QUERY = re.compile(
    rf"([?&][\w-]*(?:passw|pwd|token|secret|api_?key|credential|signature)[\w-]*=)(?:(?!&){_PART})+", re.I
)


def with_driver(url: str) -> str:
    """A PostgreSQL URL that names its driver, where it names none.

    SQLAlchemy 2.1 takes psycopg 3 for a bare "postgresql", 2.0 takes psycopg2: the one that is installed
    is the one that is meant.
    """
    scheme, mark, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    drivers = [name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name) is not None]
    return f"postgresql+{drivers[0]}{mark}{rest}" if drivers else f"postgresql{mark}{rest}"


def ambiguous(url: str) -> bool:
    """Whether the login holds characters that end it for a client, so that a part of the password
    would be taken for the host. They are to be written as %XX."""
    head = url.partition("?")[0]
    parts = urlsplit(url)
    if parts.scheme not in SERVERS:
        return "://" in url and parts.netloc != "" and head.count("@") > 1
    return " " in head or ("@" not in parts.netloc and redact(head) != head)


def redact(text: str) -> str:
    """The text without the secrets of the addresses in it: passwords before the host or in the query, and for
    a server a lone user name, which is a token. In doubt, it is hidden."""
    text = _BLANK_IN_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(_without_login, text))


def first_line(error: BaseException | None) -> str:
    """What an error says, in one line and without secrets; "" without one."""
    return "" if error is None else redact(str(error).strip().partition("\n")[0])


def _without_login(address: re.Match[str]) -> str:
    scheme, rest = address.groups()
    login, at, host = rest.rpartition("@")
    user, colon, password = login.partition(":")
    server = scheme.lower() in SERVERS
    if not at or set(user) & set("/?#") or (server and re.match(r"\d{1,5}[/?#]", password)):
        return address[0]  # what stands before the @ is a path
    if not colon and not server:
        return address[0]  # a database's user without a password
    token = server and password in ("", "x-oauth-basic")
    return f"{scheme}://{HIDDEN if token else f'{user}:{HIDDEN}'}@{host}"
