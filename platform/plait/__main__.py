"""``python -m plait``: as `plait`, with its verbs. With overrides alone it is a Hydra application: it trains
one adapter, or a search with ``-m``, and says so."""

import sys
from collections.abc import Sequence

from plait.cli.begin import ended_by_interrupts

MULTIRUN = ("-m", "--multirun")


def words(arguments: Sequence[str]) -> list[str]:
    """The arguments of `plait` that these stand for."""
    from plait.cli.main import ALONE
    from plait.cli.verbs import verbs
    from plait.utils.progress import say

    if not arguments or arguments[0] in verbs() or arguments[0] in ALONE or _is_word(arguments[0]):
        return list(arguments)
    rest = [argument for argument in arguments if argument not in MULTIRUN]
    verb = "sweep" if len(rest) < len(arguments) else "train"
    if all("=" in argument for argument in rest):  # it trains
        say(f"No verb is given: this is `plait {verb}`.")
    return [verb, *rest]


def _is_word(argument: str) -> bool:
    """Neither a flag nor an override: a verb that is misspelt."""
    return not argument.startswith("-") and "=" not in argument and argument.isidentifier()


if __name__ == "__main__":
    with ended_by_interrupts():
        from plait.cli.main import main

        sys.argv[1:] = words(sys.argv[1:])
    sys.exit(main())
