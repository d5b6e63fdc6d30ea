"""What a server has done and is doing, in Prometheus's text format.

A seam: the driver counts, the server answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock

from plait.serve.engine import Engine

TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Counts:
    """Counted since the server started, by the engine's thread and, for refusals, by the server's.

    Attributes:
        ended: requests by how they ended: a completion's reason, "cancelled", "refused" or "failed".
        first_token_seconds: from arrival to the first update, of all requests that have had one.
    """

    ended: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def end(self, how: str) -> None:
        """Count one request."""
        with self._lock:
            self.ended[how] = self.ended.get(how, 0) + 1


def page(counts: Counts, engine: Engine, adapters: int) -> str:
    """The page that Prometheus reads."""
    pool = engine.scheduler.pool
    lines: list[str] = []

    def add(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP plait_{name} {text}")
        lines.append(f"# TYPE plait_{name} {kind}")
        lines.extend(f"plait_{name}{suffix} {value}" for suffix, value in values)

    ended = [(f'{{how="{how}"}}', number) for how, number in sorted(counts.ended.items())]
    add("requests_total", "counter", "Requests by how they ended.", ended)
    add("prompt_tokens_total", "counter", "Tokens of prompts.", [("", counts.prompt_tokens)])
    add("new_tokens_total", "counter", "Tokens generated.", [("", counts.new_tokens)])
    first = [("_sum", counts.first_token_seconds), ("_count", counts.first_tokens)]
    add("first_token_seconds", "summary", "Seconds from arrival to the first token.", first)
    add("adapter_loads_total", "counter", "Adapters read from their folders.", [("", engine.store.loads)])
    for name, text, value in (
        ("requests_running", "Requests that have pages.", len(engine.running)),
        ("requests_waiting", "Requests that wait for room.", engine.scheduler.waiting),
        ("adapters", "Adapters that requests may name.", adapters),
        ("adapter_host_bytes", "Bytes of adapters kept in host memory.", engine.store.bytes),
        ("pool_pages", "Pages of the pool.", pool.pages),
        ("pool_pages_unused", "Pages that no running request needs.", pool.unused),
    ):
        add(name, "gauge", text, [("", value)])
    return "\n".join(lines) + "\n"
