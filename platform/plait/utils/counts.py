"""Counts as text for people."""


def counted(number: int, thing: str) -> str:
    """A number of things, in the singular where there is one: 1 step, 2,000 steps."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
