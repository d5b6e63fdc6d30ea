"""The linear layers that an adapter targets, by PEFT's rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from plait.core.errors import ModelError, choices
from plait.core.jobs import AdapterSpec

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LinearInfo:
    """One linear layer that an adapter may target.

    Attributes:
        name: its path in the model, as in PEFT's tensor names.
        fan_in_fan_out: whether the base stores its weight as (in, out), as GPT-2's Conv1D does.
    """

    name: str
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False


def resolve_targets(target_modules: str | Sequence[str], linears: Sequence[LinearInfo]) -> tuple[str, ...]:
    """Names of the targeted layers, in the model's order.

    A string is "all-linear" (every linear layer but the output head) or a regular expression that must
    match a whole name; a list holds names or their last parts. These are PEFT's rules
    (``peft.tuners.tuners_utils.check_target_module_exists``), but every entry of a list must match.

    Raises:
        ModelError: an entry, or the expression, matches nothing or is not a regular expression.
    """
    names = [linear.name for linear in linears]
    if isinstance(target_modules, str):
        return _by_expression(target_modules, names)
    missing = [target for target in target_modules if not any(_matches(name, target) for name in names)]
    if missing or not target_modules:
        raise _nothing(", ".join(missing) or "an empty list", names)
    return tuple(name for name in names if any(_matches(name, target) for target in target_modules))


def check_rank(spec: AdapterSpec, linears: Sequence[LinearInfo]) -> tuple[str, ...]:
    """The targets of an adapter whose rank fits all of them.

    Raises:
        ModelError: as :func:`resolve_targets`, or the rank is above a targeted layer's smaller side.
    """
    targets = resolve_targets(spec.target_modules, linears)
    sizes = {linear.name: min(linear.in_features, linear.out_features) for linear in linears}
    smallest = min(targets, key=sizes.__getitem__)
    if spec.rank > sizes[smallest]:
        raise ModelError(
            f"adapter.rank={spec.rank} on {smallest}",
            f"The rank must not be larger than the layer's smaller side, here {sizes[smallest]}.",
            f"Use a rank of at most {sizes[smallest]}, or do not target {smallest.rpartition('.')[2]}.",
        )
    return targets


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _by_expression(expression: str, names: list[str]) -> tuple[str, ...]:
    if expression == ALL_LINEAR:
        return tuple(names)
    try:
        found = tuple(name for name in names if re.fullmatch(expression, name))
    except re.error as error:
        raise ModelError(
            f"adapter.target_modules={expression!r}",
            f"A string must be a regular expression; this one is not valid: {error}.",
            "Give a list of names, an expression, or 'all-linear'.",
        ) from error
    if not found:
        raise _nothing(f"the expression {expression!r}", names)
    return found


def _nothing(what: str, names: Collection[str]) -> ModelError:
    suffixes = {name.rpartition(".")[2] for name in names}
    example = next(iter(names), "none")
    return ModelError(
        f"adapter.target_modules: {what}",
        "It does not match any linear layer of the model.",
        f"Choose from {choices(suffixes)} (full names such as {example}), or 'all-linear'. "
        "Write names as a list, even a single one: [q_proj]; a string is a regular expression.",
    )
