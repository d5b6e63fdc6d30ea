"""A trial's configuration is what Hydra would compose, whichever way it is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from plait.cli.sweeping import TrialComposer
from plait.utils.paths import conf_dir

FIXED = ["train.steps=7", "data.size=12"]


@pytest.fixture(scope="module")
def master() -> Iterator[tuple[ConfigLoader, DictConfig]]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader(), compose("config", FIXED, return_hydra_config=True)


def test_every_trial_is_as_hydra_composes_it(master: tuple[ConfigLoader, DictConfig]) -> None:
    loader, config = master
    composer = TrialComposer(loader, config, FIXED)
    trials = [
        ["adapter.rank=4", "train.lr=1e-3"],
        ["adapter.rank=8", "train.lr=2e-3"],
        ["data=jsonl", "data.path='a, b.jsonl'"],
        ["data=jsonl", "data.path=c.jsonl"],
        ["+adapter.extra=1", "adapter.rank=2"],
        ["adapter.target_modules=[q_proj,v_proj]"],
        ["adapter.rank=16"],
    ]
    for number, overrides in enumerate(trials):
        theirs = loader.load_sweep_config(config, [*FIXED, *overrides])
        with open_dict(theirs):
            theirs.hydra.job.num, theirs.hydra.job.id = number, f"{theirs.hydra.job.name}-{number}"
        ours = composer.compose(overrides, number)
        assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs), overrides
        assert ours.hydra.job.override_dirname == theirs.hydra.job.override_dirname


def test_a_key_that_does_not_exist_is_hydras_error(master: tuple[ConfigLoader, DictConfig]) -> None:
    composer = TrialComposer(*master, FIXED)
    composer.compose(["adapter.rank=4"], 0)
    with pytest.raises(ConfigCompositionException, match=r"adapter\.rnak"):
        composer.compose(["adapter.rnak=4"], 1)
