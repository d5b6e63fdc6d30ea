"""``python -m plait``: a Hydra application: one adapter, or a search with ``-m``."""

import sys

from plait.cli.main import main

if __name__ == "__main__":
    multirun = {"-m", "--multirun"} & set(sys.argv[1:])
    words = [argument for argument in sys.argv[1:] if argument not in ("-m", "--multirun")]
    sys.exit(main(["sweep" if multirun else "train", *words]))
