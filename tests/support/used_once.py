"""Imported by the process that forks: what each command would do once does not differ from one to another."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from hydra.core.hydra_config import HydraConfig
from parsed_once import parse_once
from sqlalchemy.orm import configure_mappers

from plait.cli.main import main
from plait_dashboards.page import plotly_packed

parse_once()
with redirect_stdout(io.StringIO()):  # Hydra parses its files, and its parsers learn the grammar
    status = main(
        ["sweep", "model=tiny", "data.task=chain_sum", "adapter.rank=1,2", "train.lr=1e-3", "--cfg", "all"]
    )
assert status == 0, "it was refused, so it used nothing"
HydraConfig.instance().cfg = None  # as where no command has run
configure_mappers()
plotly_packed()
