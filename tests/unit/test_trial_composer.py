"""A trial's configuration is what Hydra would compose, whichever way it is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from plait.cli.sweeping import TrialComposer
from plait.utils.paths import conf_dir

FIXED = ["train.steps=7", "data.size=12"]


@pytest.fixture
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


SEARCHES = [
    (["model=tiny", "adapter.rank=1,2", "hydra.sweep.dir=here"], ["model=tiny"], 0),
    (
        ["~train.seed", "+adapter.extra=1", "train.lr=tag(log,interval(1e-5,1e-3))"],
        ["~train.seed", "+adapter.extra=1"],
        0,
    ),
    (["data=jsonl,file", "train.steps=7"], ["train.steps=7"], 0),
    (["data=jsonl,file", "train.steps=7"], ["data=file", "train.steps=7"], 1),
]


@pytest.mark.parametrize(("arguments", "fixed", "composed"), SEARCHES)
def test_what_a_search_has_composed_is_not_composed_again(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], fixed: list[str], composed: int
) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        search = loader.load_configuration("config", [*arguments, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        HydraConfig.instance().set_config(search)  # and so its part of the configuration is read-only
        theirs = loader.load_sweep_config(search, fixed)
        calls: list[object] = []
        load = loader.load_sweep_config
        monkeypatch.setattr(loader, "load_sweep_config", lambda *given: calls.append(given) or load(*given))
        ours = TrialComposer(loader, search, fixed).compose(["train.lr=1e-3"], 0)
    with open_dict(theirs):
        theirs.train.lr = 1e-3
        theirs.hydra.job.num, theirs.hydra.job.id = 0, f"{theirs.hydra.job.name}-0"
        theirs.hydra.overrides.task.append("train.lr=1e-3")
        theirs.hydra.job.override_dirname = ours.hydra.job.override_dirname
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
    assert "train.lr=1e-3" in ours.hydra.job.override_dirname
    assert "1,2" not in ours.hydra.job.override_dirname
    assert len(calls) == composed


def test_a_group_that_nobody_has_chosen_is_hydras_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("task: own\n")
    (tmp_path / "config.yaml").write_text("defaults:\n  - data: ???\n  - _self_\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        search = loader.load_configuration("config", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        with pytest.raises(ConfigCompositionException, match="You must specify 'data'"):
            TrialComposer(loader, search, []).compose([], 0)
