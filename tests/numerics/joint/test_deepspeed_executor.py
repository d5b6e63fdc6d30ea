"""The lists of instructions give the same bits by Plait's own loop and by DeepSpeed's pipeline engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from deepspeed_stages import run_both
from forked import FORKS

STAGES = 3
HANGS = 280.0  # importing DeepSpeed takes most of the time


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_s_executor_and_the_plain_one_give_equal_bits(tmp_path: Path) -> None:
    processes = [FORKS.Process(target=run_both, args=(n, STAGES, str(tmp_path))) for n in range(STAGES)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(HANGS)
        each.kill()
    assert [each.exitcode for each in processes] == [0] * STAGES
    for number in range(STAGES):
        ended = torch.load(tmp_path / f"weights-{number}", weights_only=True)
        plain = {name: own for (kind, name), own in ended.items() if kind == "LoraStage"}
        other = {name: own for (kind, name), own in ended.items() if kind == "DeepSpeedStage"}
        assert len(plain) == len(other) == 7
        for name, own in plain.items():
            assert own.keys() == other[name].keys()
            for job, weights in own.items():
                assert all(map(torch.equal, weights, other[name][job])), (name, job)
                assert float(weights[1].norm()) > 0.0  # it was stepped
                torch.testing.assert_close(weights, plain["1f1b"][job], rtol=1e-5, atol=1e-6)
