"""The one error of the kernels: a value, the rule it breaks and the remedy."""

from __future__ import annotations


class KernelError(ValueError):
    """An argument does not fit.

    Args:
        value: what was found.
        rule: what must hold.
        remedy: what to do about it.
    """

    def __init__(self, value: str, rule: str = "", remedy: str = "") -> None:
        super().__init__(value, rule, remedy)
        self.value = value
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n".join(part for part in (self.value, self.rule, self.remedy) if part)
