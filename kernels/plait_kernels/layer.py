"""One call of a layer: which sites it has, in which columns, and which segments have an adapter there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait_kernels.bank import Bank, Site
from plait_kernels.errors import KernelError
from plait_kernels.routing import Routing, Span

SiteColumns = str | int | None
Placed = tuple[Site, slice]


Owner = tuple[Span, tuple[Placed, ...]]
Owners = tuple[Owner, ...]


@dataclass(frozen=True)
class LayerCall:
    """A layer's sites with their output columns, and for each segment those where its adapter sits.

    `owners` are the segments of plain LoRA, which every backend computes; `others` go through `reference`.
    """

    bank: Bank
    routing: Routing
    placed: tuple[Placed, ...]
    owners: Owners
    others: Owners


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
    placed = bank.placed.get(key)
    if placed is None:
        placed = bank.placed[key] = place(bank, sites, out_features)
    owners: list[Owner] = []
    others: list[Owner] = []
    found: dict[frozenset[str], tuple[Placed, ...]] = {}  # most adapters target the same sites
    for span in routing.spans:
        targets = span.block.targets
        own = found.get(targets)
        if own is None:
            own = found[targets] = tuple(pair for pair in placed if pair[0].name in targets)
        if own:
            (owners if span.block.variant.fused else others).append((span, own))
    return LayerCall(bank, routing, placed, tuple(owners), tuple(others))
