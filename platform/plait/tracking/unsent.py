"""Sends what processes that have ended left in their event logs."""

from __future__ import annotations

from pathlib import Path

from plait.core.settings import TrackingSettings
from plait.tracking.connection import open_store, storage_errors
from plait.tracking.event_log import EventLog, free_logs, logs_folder
from plait.tracking.location import locate
from plait.tracking.mlflow_store import Store, StoreSender
from plait.tracking.writer import BATCH, RefusedError, describe_refused, gather
from plait.utils.addresses import redact


def left_unsent(settings: TrackingSettings, search: str) -> list[str]:
    """What ended processes of a search left unsent, in words."""
    found = []
    for log in free_logs(logs_folder(locate(settings).root, search)):
        if log.waiting:
            found.append(log.describe_unsent())
        log.close()
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
    folder = logs_folder(location.root, search)
    if not any(folder.glob("*")):
        return []
    return send_logs(open_store(location, settings.experiment), folder)


def send_logs(store: Store, folder: Path) -> list[str]:
    """Send what the logs of a folder hold that no process has open; as :func:`send_left`.

    A log stays where it is, without anything unsent: it knows which points are written. Only that of a
    search's run which is not in this store, or that was deleted, is not sent.
    """
    troubles: list[str] = []
    for log in free_logs(folder):
        try:
            if log.waiting:
                troubles += _send(store, log)
        finally:
            log.close()
    return troubles


def _send(store: Store, log: EventLog) -> list[str]:
    head = log.head
    with storage_errors(store.location):
        if store.run(head.parent_id) is None:
            return [log.describe_unsent()]
        sender = StoreSender(lambda: store, head.parent_id, {head.parent: head.parent_id})
        refused: list[str] = []
        while batch := log.peek(BATCH):
            for request in gather(batch):
                try:
                    sender.send(request)
                except RefusedError as refusal:
                    refused.append(redact(str(refusal)))
            log.drop()
    return describe_refused(refused)
