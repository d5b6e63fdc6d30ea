"""Whether a sampler can do a space: pure, so that it is known before anything is imported or loaded."""

from __future__ import annotations

import importlib.util

from plait.core.errors import SearchError, choices
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Domain, Space, Value

LEARNING = ("tpe", "gp", "cmaes")  # samplers that can be given trials of another study


def check_sampler(settings: SearchSettings, space: Space) -> None:
    """The sampler can do the space.

    Raises:
        SearchError: it cannot.
    """
    name = settings.sampler
    chosen = [item.name for item in space.dimensions if isinstance(item.domain, Choice)]
    if settings.prior is not None and name not in LEARNING:
        raise SearchError(
            f"search.prior={settings.prior} with search.sampler={name}",
            "It takes no knowledge from an earlier study.",
            f"Take one of {choices(LEARNING)}, or leave out search.prior.",
        )
    if name == "grid":
        grid(space)
    if name in ("cmaes", "qmc") and chosen:
        raise SearchError(
            f"search.sampler={name} with {chosen[0]}: choice",
            f"The {name} sampler draws numbers from ranges; choices would be left to chance.",
            f"Write {chosen[0]} as range(...) or interval(...), or take search.sampler=tpe.",
        )
    if name == "cmaes" and len(space.dimensions) < 2:
        raise SearchError(
            "search.sampler=cmaes with one key",
            "CMA-ES needs at least two.",
            "Sweep a second key, or take search.sampler=tpe.",
        )
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise SearchError(
            "search.sampler=cmaes",
            "It needs the package cmaes.",
            "Install it: pip install 'plait[samplers]'.",
        )


def grid(space: Space) -> dict[str, list[Value]]:
    """Every value of every dimension.

    Raises:
        SearchError: a dimension without steps.
    """
    return {dimension.name: _values(dimension.name, dimension.domain) for dimension in space.dimensions}


def too_few_points(settings: SearchSettings, space: Space) -> str:
    """What is to be said of a space that has fewer points than trials were asked for; "" where it has enough:
    a point that was drawn is not drawn again."""
    size = space.size
    if size is None or size >= settings.trials:
        return ""
    return f"The space has {size} points, {settings.trials} trials were asked for: each point is drawn once."


def _values(name: str, domain: Domain) -> list[Value]:
    if domain.count is None:
        raise SearchError(
            f"search.sampler=grid with {name}: {domain}",
            "A grid needs values that can be counted.",
            f"Write {name}=choice(...) or range(...), or take another sampler.",
        )
    return [domain.at(place) for place in range(domain.count)]
