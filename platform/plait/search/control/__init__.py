"""Steering a search while it runs: `plait control` writes requests, the running search acts on them."""

from plait.search.control.mailbox import Answer, Mailbox, Request
from plait.search.control.orders import Orders

__all__ = ["Answer", "Mailbox", "Orders", "Request"]
