"""One call of a layer: which sites it has, in which columns, and which segments have an adapter there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from plait_kernels.bank import Bank, Site
from plait_kernels.errors import KernelError
from plait_kernels.routing import Generations, Routing, Span

SiteColumns = str | int | None
Placed = tuple[Site, slice]
Owner = tuple[Span, tuple[Placed, ...]]
Owners = tuple[Owner, ...]


class Layer:
    """What does not change from call to call of a layer: its sites with their output columns, and tables.

    Attributes:
        widest: the most outputs of a site.
        outputs: those of each site.
        kind: what distinguishes the launches of a microbatch's layers: columns of each site, and outputs.
        align: 16 if all columns begin at a multiple of it, so that several elements may be loaded at once;
            else 1.
        tables: what a backend made for it.
        checked: the weight, bias and backend with which it was last called, which fit.
    """

    checked: tuple[Any, Any, Any] = (None, None, None)

    def __init__(self, placed: tuple[Placed, ...], out_features: int) -> None:
        self.placed = placed
        self.kind = (*((columns.start, columns.stop) for _, columns in placed), out_features)
        self.outputs = tuple(site.out_features for site, _ in placed)
        self.widest = max(self.outputs, default=0)
        edges = [edge for _, columns in placed for edge in (columns.start, columns.stop)]
        self.align = 16 if all(edge % 16 == 0 for edge in (*edges, out_features)) else 1
        self.tables: dict[object, Any] = {}
        self._own: dict[frozenset[str], tuple[Placed, ...]] = {}

    def own(self, targets: frozenset[str]) -> tuple[Placed, ...]:
        """The sites that are among these."""
        found = self._own.get(targets)
        if found is None:
            found = self._own[targets] = tuple(pair for pair in self.placed if pair[0].name in targets)
        return found


@dataclass(slots=True, eq=False)
class LayerCall:
    """A layer, and for each segment the sites where its adapter sits.

    Args:
        owned: whether there are owners.
        alike: the sites, if all segments are plain LoRA at the same ones. A pair for each segment is made
            only when it is asked for: collecting so many costs the host more than a launch.
        mixed: the owners, if not.
        others: the segments that go through `reference`.
        kept: what a backend's forward looked up for its backward.
    """

    bank: Bank
    routing: Routing
    layer: Layer
    owned: bool
    alike: tuple[Placed, ...] = ()
    mixed: Owners = ()
    others: Owners = ()
    kept: Any = None

    @property
    def owners(self) -> Owners:
        """The segments of plain LoRA, which every backend computes."""
        return tuple(zip(self.routing.spans, repeat(self.alike))) if self.alike else self.mixed

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The layer's sites with their output columns."""
        return self.layer.placed

    def changed_since(self, before: Generations) -> list[str]:
        """The adapters here whose weights were refreshed since then."""
        changed = {
            span.block.adapter
            for span, _ in (*self.owners, *self.others)
            if span.block.generation != before.of[span.block.adapter]
        }
        return sorted(changed)


def place(bank: Bank, sites: Sequence[SiteColumns], out_features: int) -> tuple[Placed, ...]:
    """Give every named site its columns of a layer with `out_features` outputs.

    An int counts columns without adapters. A run of None takes the columns that are left over.

    Raises:
        KernelError: a site is unknown, or the widths do not add up.
    """
    unknown = [site for site in sites if isinstance(site, str) and site not in bank.site_index]
    if unknown:
        raise KernelError(
            f"sites {unknown}",
            "a layer's sites are in its bank",
            f"the bank has {', '.join(bank.site_index)}",
        )
    found = [bank.sites[bank.site_index[site]] if isinstance(site, str) else site for site in sites]
    widths = [site.out_features if isinstance(site, Site) else site for site in found]
    left = out_features - sum(width or 0 for width in widths)
    holes = [index for index, width in enumerate(widths) if width is None]
    if left < 0 or (left > 0) != bool(holes) or (holes and holes[-1] - holes[0] + 1 != len(holes)):
        raise KernelError(
            f"sites {list(sites)} for a weight of {out_features} outputs",
            "the sites' outputs add up to the weight's, None taking what is left in one place",
            "give the number of columns without adapters in place of None",
        )
    placed, start = [], 0
    for index, (site, width) in enumerate(zip(found, widths, strict=True)):
        columns = width if width is not None else (left if index == holes[0] else 0)
        if isinstance(site, Site):
            placed.append((site, slice(start, start + columns)))
        start += columns
    return tuple(placed)


def layer_call(bank: Bank, routing: Routing, sites: Sequence[SiteColumns], out_features: int) -> LayerCall:
    """The call of one layer for one microbatch."""
    key = (tuple(sites), out_features)
    layer = bank.layers.get(key)
    if layer is None:
        layer = bank.layers[key] = Layer(place(bank, sites, out_features), out_features)
    if routing.alike is not None:
        own = layer.own(routing.alike)
        return LayerCall(bank, routing, layer, bool(own), alike=own)
    owners: list[Owner] = []
    others: list[Owner] = []
    for span in routing.spans:
        own = layer.own(span.block.targets)
        if own:
            (owners if span.block.variant.fused else others).append((span, own))
    return LayerCall(bank, routing, layer, bool(owners), mixed=tuple(owners), others=tuple(others))
