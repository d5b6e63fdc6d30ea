"""The mailbox of a search: requests of its owner, and answers; plain files.

``control/`` in the search's folder holds

    requests/NUMBER-ID.json what was asked and is not yet done; read in this order
    answers/ID.json         what was said to it
    orders.json             the standing orders as they were last seen in the study, where they are kept
    desk.lock               locked by the process that reads the requests: one of the search's workers

Each file appears whole: it is written under another name and renamed. A request is removed after its answer
is there, so that one which a killed search had begun is done again; doing one twice changes nothing more
(an added trial bears the request's id). The lock is the operating system's: it falls with its process,
however that ends.
"""

from __future__ import annotations

import fcntl
import json
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from plait.core.errors import StorageError
from plait.search.control.orders import Orders, orders_in
from plait.utils.files import write_text

POLL_SECONDS = 0.05
MOST_ANSWERS = 100


@dataclass(frozen=True, slots=True)
class Request:
    """One command of the search's owner.

    Attributes:
        verb: status, facts, pause, resume, stop, cancel, add or clone.
        trial: the trial that it is about; None for the whole search.
        overrides: values of searched keys (add, clone).
        warm: start from the weights of the cloned trial.
        id: its own.
    """

    verb: str
    trial: int | None = None
    overrides: tuple[str, ...] = ()
    warm: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search says to a request: done or refused, in a sentence or an error's lines."""

    done: bool
    text: str


class Desk:
    """Who has it acts on requests: one process at a time, until it gives it up or ends, however it ends."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._file: IO[bytes] | None = None
        self._taken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave it to others."""
        if self._file is not None:
            self._file.close()  # and with it the lock falls
        self._file, self._taken = None, False

    def take(self) -> bool:
        """Whether this process has the desk, now that it has tried to get it.

        Raises:
            StorageError: the folder cannot be written.
        """
        if self._taken:
            return True
        try:
            if self._file is None:
                self._lock.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._lock.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unusable(self._lock, error) from error
        self._taken = True
        return True


class Mailbox:
    """Both ends of it.

    Args:
        folder: ``control/`` of the search; made when something is first written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests = folder / "requests"
        self._answers = folder / "answers"
        self._orders = folder / "orders.json"

    def post(self, request: Request) -> None:
        """Leave a request.

        Raises:
            StorageError: the folder cannot be written.
        """
        before = [path.name.partition("-")[0] for path in self._requests.glob("*.json")]
        number = 1 + max((int(each) for each in before if each.isdecimal()), default=0)  # no clock: they jump
        self._write(self._requests / f"{number:020d}-{request.id}.json", asdict(request))

    def waiting(self) -> list[Request]:
        """The requests not yet answered, oldest first; what is not a request is left alone."""
        found = []
        for path in sorted(self._requests.glob("*.json")):
            request = _request(_read(path))
            if request is not None and path.name.endswith(f"-{request.id}.json"):
                found.append(request)
        return found

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request, and take it out of the box. Of answers that nobody fetched the last ones stay."""
        self._write(self._answers / f"{request.id}.json", asdict(answer))
        left = list(self._answers.glob("*.json"))
        if len(left) > MOST_ANSWERS:
            min(left, key=_age).unlink(missing_ok=True)
        for path in self._requests.glob(f"*-{request.id}.json"):
            path.unlink(missing_ok=True)

    def take_answer(self, request: Request, seconds: float) -> Answer | None:
        """The answer to a request, waited for; None if it has not come after ``seconds``."""
        path = self._answers / f"{request.id}.json"
        until = time.monotonic() + seconds
        while True:
            content = _read(path)
            if content is not None:
                path.unlink(missing_ok=True)
                return Answer(**content)
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_SECONDS)

    @property
    def orders(self) -> Orders:
        """The standing orders as this folder's workers last saw them."""
        return orders_in(_read(self._orders))

    def show_orders(self, orders: Orders) -> None:
        """Write down which orders stand, for whoever looks into this folder."""
        if orders != self.orders:
            self._write(self._orders, orders.content())

    @property
    def orders_stamp(self) -> tuple[int, int] | None:
        """Another one after every change of the orders that a worker of this folder made, or has heard of."""
        try:
            found = self._orders.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino  # two changes may come within one tick of the file's clock

    def empty(self) -> None:
        """Throw all requests away: they were about another search of this name."""
        for path in self._requests.glob("*.json"):
            path.unlink(missing_ok=True)

    def desk(self) -> Desk:
        """The place from which requests are acted on."""
        return Desk(self._folder / "desk.lock")

    @property
    def attended(self) -> bool:
        """Whether a running search has the desk."""
        try:
            with (self._folder / "desk.lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may ask at the same moment
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise _unusable(self._folder, error) from error
        return False

    def _write(self, path: Path, content: object) -> None:
        try:
            write_text(path, json.dumps(content))
        except OSError as error:
            raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: {error.strerror or error}",
        "Requests to a running search are kept there.",
        "Free some space, or make the folder writable.",
    )


def _age(answer: Path) -> tuple[int, str]:
    """Less for an older one; one that is fetched meanwhile counts as the oldest."""
    try:
        return answer.stat().st_mtime_ns, answer.name
    except FileNotFoundError:
        return 0, answer.name


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none (yet)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # no JSON, or no UTF-8
        return None
    return content if isinstance(content, dict) else None


def _request(content: dict[str, Any] | None) -> Request | None:
    """What a file of requests asks; None where it is something else. Further keys are passed over."""
    match content:
        case {
            "verb": str(verb),
            "trial": int() | None as trial,
            "overrides": [*overrides],
            "warm": bool(warm),
            "id": str(own),
        } if all(isinstance(each, str) for each in overrides):
            return Request(verb, trial, tuple(overrides), warm, own)
    return None
