"""The linear layers that an adapter targets, by PEFT's rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.core.errors import ModelError, choices

ALL_LINEAR = "all-linear"
READ_TOGETHER = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # same inputs


@dataclass(frozen=True, slots=True)
class LinearInfo:
    """One linear layer that an adapter may target.

    Attributes:
        name: its path in the model, as in PEFT's tensor names.
        fan_in_fan_out: whether the base stores its weight as (in, out), like GPT-2's Conv1D.
    """

    name: str
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False


def read_together(linears: Iterable[LinearInfo]) -> Mapping[tuple[str, str], Sequence[LinearInfo]]:
    """Linears by the input that they read, as far as their names say it."""
    found = defaultdict(list)
    for each in linears:
        layer, _, last = each.name.rpartition(".")
        found[layer, READ_TOGETHER.get(last, last)].append(each)
    return found


def layer_of(name: str) -> int:
    """The number of the decoder layer of a linear, by its name."""
    return next(int(part) for part in name.split(".") if part.isdecimal())


def resolve_targets(
    target_modules: str | Sequence[str], linears: Sequence[LinearInfo], outside: Collection[str] = ()
) -> tuple[str, ...]:
    """Names of the targeted layers, in the model's order.

    A string is "all-linear" (every linear layer but the output head) or a regular expression that must match
    a full name; a list contains names or their last parts. These are PEFT's rules
    (``peft.tuners.tuners_utils.check_target_module_exists``), except that every entry of a list must match.
    As in PEFT, the rank has no upper limit: it may exceed a layer's sizes.

    Args:
        outside: what PEFT would also adapt if it is named, and Plait cannot: output head, routed experts.

    Raises:
        ModelError: an entry, or the expression, matches nothing or something of ``outside``, or it is not a
            regular expression.
    """
    names = [linear.name for linear in linears]
    if target_modules == ALL_LINEAR:
        return tuple(names)
    entries = [target_modules] if isinstance(target_modules, str) else target_modules
    match = _expression(target_modules) if isinstance(target_modules, str) else _by_name
    missing = [entry for entry in entries if not any(match(name, entry) for name in (*names, *outside))]
    if missing or not entries:
        raise _nothing(", ".join(missing) or "an empty list", names)
    beyond = [name for name in outside if any(match(name, entry) for entry in entries)]
    if beyond:
        raise ModelError(
            f"adapter.target_modules={target_modules!r} matches {beyond[0]}",
            "Only plain linear layers inside the decoder layers can have adapters, not routed experts.",
            "Restrict it to those, for example by an expression, or use 'all-linear', which skips others.",
        )
    return tuple(name for name in names if any(match(name, entry) for entry in entries))


def _by_name(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _expression(expression: str) -> Callable[[str, str], bool]:
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise ModelError(
            f"adapter.target_modules={expression!r}",
            f"A string must be a regular expression; this one is not valid: {error}.",
            "Give a list of names, an expression, or 'all-linear'.",
        ) from error
    return lambda name, _: compiled.fullmatch(name) is not None


def _nothing(what: str, names: Collection[str]) -> ModelError:
    suffixes = {name.rpartition(".")[2] for name in names}
    example = next(iter(names), "none")
    return ModelError(
        f"adapter.target_modules: {what}",
        "It does not match any linear layer of the model.",
        f"Choose from {choices(suffixes)} (full names such as {example}), or all-linear, which is not "
        "written in a list. Names are, even a single one: [q_proj]; another string is a regular expression.",
    )
