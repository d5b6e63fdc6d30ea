"""Addresses of databases and servers: with the driver that is installed, and without secrets in print."""

from __future__ import annotations

import importlib.util
import re


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


def redact(text: str) -> str:
    """The text with the password of every URL in it, before the host or in the query, as three asterisks."""
    before_host = re.sub(r"(://[^/\s:@]*):[^/\s@]+@", r"\1:***@", text)
    return re.sub(r"([?&](?:password|sslpassword)=)[^&\s'\"]+", r"\1***", before_host)
