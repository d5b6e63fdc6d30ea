"""Sends what processes that have ended left in their spools."""

from __future__ import annotations

from pathlib import Path

from plait.core.settings import TrackingSettings
from plait.tracking.check import open_store, storage_errors
from plait.tracking.location import locate
from plait.tracking.operations import gather
from plait.tracking.outgoing import spool_folder, unsent
from plait.tracking.sender import StoreSender
from plait.tracking.spool import Spool, free_spools
from plait.tracking.store import Store
from plait.tracking.writer import BATCH, RefusedError


def left_unsent(settings: TrackingSettings, search: str) -> list[str]:
    """What ended processes of a search left unsent, in words."""
    found = []
    for spool in free_spools(spool_folder(locate(settings).root, search)):
        if spool.waiting:
            found.append(unsent(spool, None))
        spool.close()
    return found


def send_left(settings: TrackingSettings, search: str) -> list[str]:
    """Send what is left of a search; nothing where nothing is. Waits for the store.

    Returns:
        what could not be sent for good, in words.

    Raises:
        AwayError: the store does not answer; what was not sent is kept.
        StorageError: it refuses.
    """
    location = locate(settings)
    folder = spool_folder(location.root, search)
    if not any(folder.glob("*")):
        return []
    return send_spools(open_store(location, settings.experiment), folder)


def send_spools(store: Store, folder: Path) -> list[str]:
    """Send what the spools of a folder hold that no process has open; as :func:`send_left`.

    A spool stays where it is, without anything unsent: which points are written is known from it. Only that
    of a search's run which is not in this store, or that somebody deleted, is not sent.
    """
    troubles: list[str] = []
    for spool in free_spools(folder):
        try:
            if spool.waiting:
                troubles += _send(store, spool)
        finally:
            spool.close()
    return troubles


def _send(store: Store, spool: Spool) -> list[str]:
    head = spool.head
    if head is None:
        return []
    with storage_errors(store.location):
        if store.run(head.parent_id) is None:
            return [unsent(spool, None)]
        sender = StoreSender(lambda: store, head.parent_id, {head.parent: head.parent_id})
        refused: list[str] = []
        while batch := spool.peek(BATCH):
            for request in gather(batch):
                try:
                    sender.send(request)
                except RefusedError as verdict:
                    refused.append(str(verdict))
            spool.drop()
    return [f"{len(refused)} records were refused; the first: {refused[0]}"] if refused else []
