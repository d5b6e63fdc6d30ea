"""Hydra's flags and complaints through `plait`, and hydra.sweeper.* beside search.*."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.errors import ConfigCompositionException

from plait.cli import sweeping
from plait.cli.app import show_space, shows_only
from plait.cli.hydra_errors import SPACES, explain, explain_fault
from plait.cli.main import main
from plait.cli.sweeping import merge
from plait.config.overrides import read_request, spaces
from plait.core.errors import ConfigError
from plait.core.settings import SearchSettings
from plait.search.recorded import RecordedCommand
from plait.search.samplers import SAMPLERS
from plait.search.trials import SearchCommand
from plait.utils.paths import conf_dir, sweeps_dir


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


# ---- flags ---------------------------------------------------------------------------------------------


OWN_FILES = {
    "broken": "# @package _global_\nmode: train\n search: {",
    "bare": "search:\n  trials: 3\n",
    "lists": """# @package _global_
search:
  params: {adapter.rank: [2, 4], train.lr: "1e-4,1e-3"}
  enqueue: [{adapter.rank: 4}]
""",
}


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("+sweeps=broken", ["sweeps/broken.yaml, line 3: mapping values", "must be YAML"]),
        ("+sweeps=bare", ["unknown key sweeps", "begin it with the line `# @package _global_`"]),
        ("+sweeps=lists", ["adapter.rank=[2,4]", "leave out the brackets: adapter.rank=2,4"]),
        ("+sweep=lists", ["unknown key sweep", "Did you mean +sweeps?"]),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, named: list[str]
) -> None:
    (tmp_path / "sweeps").mkdir()
    for name, text in OWN_FILES.items():
        (tmp_path / "sweeps" / f"{name}.yaml").write_text(text)
    assert main(["sweep", "model=tiny", "--config-dir", str(tmp_path), argument]) == 2
    err = capsys.readouterr().err
    assert all(each in err for each in named), err


@pytest.mark.parametrize("verb", ["sweep", "train"])
def test_cfg_shows_the_job(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, verb, "model=tiny", "adapter.rank=5", "--cfg", "job")
    shown = yaml.safe_load(out)
    assert status == 0
    assert shown["adapter"]["rank"] == 5
    assert shown["model"]["kind"] == "tiny"
    assert "hydra" not in shown


@pytest.mark.parametrize(
    "option",
    ["+search.stopping.options.n_startup_trials=3", "++search.stopping.options={n_startup_trials: 3}"],
)
def test_a_pruners_options_can_be_written_as_the_error_says(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(
        capsys, "sweep", "search/stopping=optuna", option, "adapter.rank=1,2", "--cfg", "job"
    )
    assert status == 0
    assert yaml.safe_load(out)["search"]["stopping"]["options"] == {"n_startup_trials": 3}


def test_cfg_of_a_sweep_shows_its_space(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "adapter.rank=4,8",
        "train.schedule=choice(linear,'a b')",
        "data=jsonl,reasoning_gym",
        "--cfg",
        "job",
    ]
    status, out, _ = run(capsys, "sweep", *arguments)
    assert status == 0
    assert yaml.safe_load(out)["search"]["params"] == {
        "adapter.rank": "4,8",
        "train.schedule": "choice(linear,'a b')",
        "data": "jsonl,reasoning_gym",
    }


def test_help_says_what_to_do_and_lists_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sweep", "--help")
    assert status == 0
    for words in (
        "plait sweep",
        "tag(log,interval",
        "model: ",
        "smollm2-135m",
        "rank: 16",
        "  alpha: null                                 # null: 2 * rank",
        "    every: null                               # or steps between rungs",
        "plait -sc install=bash",
    ):
        assert words in out


def test_info_shows_where_things_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sweep", "--info", "searchpath")
    assert status == 0
    assert str(conf_dir()) in out
    assert str(sweeps_dir().parent) in out


def test_nothing_else_in_the_folder_of_sweeps_is_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "sweep", "--help")
    groups = out.split("Groups")[1].split("Settings")[0]
    assert "sweeps: " in groups
    assert not [line for line in groups.splitlines() if line.startswith(("  platform", "  tests", "  conf"))]


def test_a_sweep_folder_given_by_the_user_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\nadapter: {rank: 3}\n"
    )
    status, out, _ = run(capsys, "sweep", "--config-dir", str(tmp_path), "+experiment=mine", "--cfg", "job")
    assert status == 0
    assert yaml.safe_load(out)["model"]["kind"] == "tiny"
    assert yaml.safe_load(out)["adapter"]["rank"] == 3


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SearchCommand]:
    """The searches that would be trained."""
    found: list[SearchCommand] = []

    def keep(command: SearchCommand, **_: bool) -> int:
        found.append(command)
        return 0

    monkeypatch.setattr(sweeping, "_launched", keep)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("verb", ["sweep", "train"])
def test_own_folders_of_groups_are_found_again_in_their_order(
    verb: str, launched: list[SearchCommand], tmp_path: Path
) -> None:
    for number, folder in enumerate(("my conf's", "b")):
        (tmp_path / "work" / folder / "adapter").mkdir(parents=True)
        (tmp_path / "work" / folder / "adapter" / "mine.yaml").write_text(f"rank: {number + 3}\n")
    given = ["model=tiny", "adapter=mine", "hydra.searchpath=[file://b]", "--config-dir", "my conf's"]
    with chdir(tmp_path / "work"):
        assert main([verb, *given]) == 0
    (tmp_path / "work").rename(tmp_path / "moved")
    for number in (0, 1):  # what a resumed search records is enough to resume it again
        command = RecordedCommand("mine", verb, launched[number].overrides, str(tmp_path))
        with chdir(tmp_path / "moved"):
            assert main(command.words()) == 0
    assert [each.base.adapter.rank for each in launched] == [3, 3, 3]
    assert launched[1].overrides == launched[2].overrides


def test_a_space_followed_by_a_value_is_no_space_for_one_adapter_either(
    launched: list[SearchCommand], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "model=tiny", "adapter.rank=4,8", "adapter.rank=2"]) == 0
    assert launched[0].base.adapter.rank == 2
    capsys.readouterr()
    status, out, _ = run(capsys, "train", "adapter.rank=4,8", "adapter.rank=2", "--cfg", "job")
    assert (status, yaml.safe_load(out)["adapter"]["rank"]) == (0, 2), "and is shown so"
    status, _, err = run(capsys, "train", "adapter.rank=2", "adapter.rank=4,8", "--cfg", "job")
    assert (status, "trains one adapter" in err) == (2, True)


def test_settings_may_stand_on_both_sides_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sweep", "model=tiny", "--cfg", "job", "train.steps=7")
    assert status == 0
    assert "steps: 7" in out


def test_a_group_of_the_users_own_needs_a_plus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nadapter: {rank: 3}\n")
    status, _, err = run(capsys, "sweep", "--config-dir", str(tmp_path), "experiment=mine")
    assert status == 2
    assert "+experiment=mine" in err


def test_flags_that_only_show_the_configuration_are_recognised() -> None:
    assert shows_only(["a=1", "--cfg", "job"])
    assert shows_only(["--cfg=job"])
    assert not shows_only(["a=1", "--config-dir", "x"])


def test_a_swept_key_with_quotes_is_still_an_override() -> None:
    assert show_space(["a=1", "train.x='a b',c"]) == ["a=1", r"++search.params={train.x: '\'a b\',c'}"]
    assert show_space(["+a=1,2", "b=3", "a=4"]) == ["b=3", "a=4"], "the last counts"
    assert spaces(["+a=1,2", "b=3,4", "a=4"]) == ["b=3,4"], "so `plait train` takes it"
    assert spaces(["a=1", "a=2,3"]) == ["a=2,3"]


# ---- complaints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "adapter.rnak=3"], ["unknown key adapter.rnak", "Did you mean adapter.rank"]),
        (["sweep", "adapter.rnak=3,4"], ["unknown key adapter.rnak", "Did you mean adapter.rank"]),
        (["sweep", "adaptr.rank=3,4"], ["adaptr.rank is swept", "Did you mean adapter.rank?"]),
        (["sweep", "lr=interval(1,2)"], ["lr is swept", "Did you mean train.lr?"]),
        (
            ["sweep", "search.params={adapter.rank: '4,8'}"],
            ["search.params={adapter.rank", "++search.params={adapter.rank: '4,8'}"],
        ),
        (
            ["sweep", "search/stopping=optuna", "search.stopping.options={n_startup_trials: 3}"],
            ["Add them: ++search.stopping.options={n_startup_trials: 3}"],
        ),
        (
            ["sweep", "search/stopping=optuna", "search.stopping.options.n_startup_trials=3"],
            [
                "search.stopping.options has no keys yet",
                "Add it: +search.stopping.options.n_startup_trials=3",
            ],
        ),
        (["sweep", "data.nothing=3"], ["unknown key data.nothing", "data.task"]),
        (
            ["sweep", "data.completion_field=a"],
            ["exists only with data=file or data=hub", "`data=file data.completion_field=a`"],
        ),
        (["sweep", "data.path=x"], ["exists only with data=file.", "`data=file data.path=x`"]),
        (["sweep", "data.path=x,y"], ["exists only with data=file.", "`data=file data.path=x,y`"]),
        (
            ["sweep", "data=file,reasoning_gym", "data.path=x"],
            ["sweeps the group", "data/NAME.yaml with `defaults: [file]`", "--config-dir FOLDER"],
        ),
        (["sweep", "+data.path=x"], ["unknown key data.path", "data.task"]),
        (["train", "data=file", "data.task_options.a=1"], ["exists only with data=reasoning_gym."]),
        (["sweep", "model.id=a/b"], ["with model.kind=smollm2", "`model=hf model.id=a/b`"]),
        (["sweep", "model=hf", "model.id=a", "model.path=x"], ["`model=gguf model.path=x`"]),
        (["sweep", "data=jsonl", "data.pth=x"], ["unknown key data.pth", "Did you mean data.path"]),
        (["sweep", "+adapter.rnak=3"], ["unknown key adapter.rnak", "Did you mean adapter.rank"]),
        (["sweep", "+nothing.at=3"], ["unknown key nothing"]),
        (["sweep", "modle=tiny"], ["unknown key modle", "Did you mean model?"]),
        (["sweep", "modle=tiny,small"], ["modle is swept", "Did you mean model? It belongs to the run"]),
        (["train", "learning_rate=1e-3"], ["unknown key learning_rate", "Did you mean train.lr?"]),
        (["sweep", "learning_rate=1e-3,1e-4"], ["is swept", "Did you mean train.lr?"]),
        (["sweep", "adapter.r=4"], ["unknown key adapter.r", "Did you mean adapter.rank?"]),
        (["sweep", "train_file=x"], ["unknown key train_file", "Did you mean data.path?"]),
        (["sweep", "=5"], ["must be a string or a list"]),
        (["sweep", "search.constraints=5"], ["search.constraints=5", "a mapping"]),
        (["sweep", "hydra.sweep.dir='${nope}'"], ["'nope'", "hydra.sweep.dir"]),
        (["sweep", "~search"], ["search"]),
        (["sweep", f"{'x' * 100_000}=1"], ["File name too long", "characters)"]),
        (["sweep", "model=tiny", f"search.name={'x' * 300}"], ["300 characters", "search.name"]),
        (["sweep", "model=tiny", "data=jsonl", f"data.path={'x' * 300}"], ["File name too long"]),
        (["sweep", "model=tiny", "tracking.root='~nosuchuser/x'"], ["~nosuchuser/x"]),
        (["sweep", "engine.threads=100000000"], ["engine.threads=100000000", "between 1 and"]),
        (
            ["sweep", "search/stopping=threshold", "search.stopping.lower=3", "search.stopping.upper=2"],
            ["search.stopping.lower=3", "must not be above"],
        ),
        (
            ["train", "lr=1e-3"],
            ["unknown key lr", "Did you mean train.lr? Settings are GROUP.KEY=VALUE, in adapter,"],
        ),
        (["train", "adaptr.rank=3"], ["unknown key adaptr.rank", "Did you mean adapter.rank?"]),
        (["sweep", "search/stoping=asha"], ["search/stoping", "Did you mean search/stopping?"]),
        (["sweep", "model=llama"], ["model=llama", "model=hf model.id=ID"]),
        (["sweep", "model=tyni"], ["model=tyni", "Did you mean model=tiny", "smollm2-135m"]),
        (["sweep", "data=a,b"], ["data=a", "jsonl, mixture, reasoning_gym"]),
        (["sweep", "+sweeps=quick"], ["sweeps=quick", "Did you mean sweeps=quickstart"]),
        (
            ["sweep", "adapter.rank=choice(1,2"],
            ["cannot be read", "KEY=VALUE", "`adapter.rank=choice("],
        ),
        (["sweep", "train.lr=interval(1e-3)"], ["cannot be read", "`train.lr=interval(1e-5,1e-3)`"]),
        (["sweep", "adapter.rank=choice()"], ["cannot be read", "`adapter.rank=choice(4,8,16)`"]),
        (
            ["sweep", "train.lr=choice(interval(1e-4,1e-3),1)"],
            ["A choice holds single values, not intervals"],
        ),
        (["sweep", "cluster=2"], ["cluster=2", "the name of a group of settings", "h100_llama31_8b, "]),
        (["sweep", "data=jsonl,file", "cluster=2"], ["plait: cluster=2", "the name of a group of settings"]),
        (["sweep", "search.name=my näme"], ["'ä' must be in quotes", "Here: \"search.name='my näme'\""]),
        (["sweep", "data.path=/a(1).jsonl"], ["mismatched input '('", "Here: \"data.path='/a(1).jsonl'\""]),
        (["sweep", "search.name=it's"], ["cannot be read", "For example key="]),
        (["sweep", "train.lr"], ["plait: train.lr", "has no value", "Write train.lr=VALUE."]),
        (["sweep", "adapter.rank:2"], ["has no value", "Write adapter.rank=2."]),
        (["sweep", "adapter/rank=2"], ["A dot comes between", "Write adapter.rank=2."]),
        (["sweep", "adapter.rank={2, 4}"], ["leave out the braces: adapter.rank=2,4"]),
        (["sweep", "adapter.rank=[2,4]"], ["leave out the brackets: adapter.rank=2,4"]),
        (["sweep", "adapter.rank=true,4"], ["plait: adapter.rank=true\n"]),
        (["sweep", "search.enqueue=[{adapter.rank:"], ["not closed", "with a blank must be in quotes"]),
        (
            ["sweep", "search.constraints=adapter.rank<=4"],
            ["Write search.constraints=\"{adapter.rank: '<= 4'}\"."],
        ),
        (["sweep", "search.constraints={train.lr: '< 4 and > 2'}"], ["{train.lr: '<= 4'}"]),
        (["sweep", "train.optimizer=adafactor"], ["unknown key train.optimizer", "Plait trains with AdamW"]),
        (["sweep", "optim=adam,sgd"], ["optim is swept", "Plait trains with AdamW"]),
        (["sweep", "train.lr=loguniform(1e-4,1e-3)"], ["train.lr=tag(log,interval(1e-4,1e-3))?"]),
        (["sweep", "train.lr=log(interval(1e-4,1e-3))"], ["train.lr=tag(log,interval(1e-4,1e-3))?"]),
        (["sweep", "train.lr=log(1e-4,1e-3)"], ["train.lr=tag(log,interval(1e-4,1e-3))?"]),
        (
            ["sweep", "model=tiny", "adapter.rank=1,2", "search.metric=accuracy"],
            ["Did you mean eval/accuracy?"],
        ),
        (
            ["sweep", "train.lr=intervall(0,1e-4)"],
            ["train.lr=intervall(0,1e-4)", "no function intervall", "Did you mean interval? Available: "],
        ),
        (
            ["sweep", "model=tiny", "train.lr=1e-4,nan"],
            ["train.lr: choice(0.0001,nan)", "nan is not a number"],
        ),
        (
            ["sweep", "search.enqueue={adapter.rank: 8}"],
            ["search.enqueue is a list", "'search.enqueue=[{adapter.rank: 8}]'"],
        ),
        (["sweep", "train.eps=glob(*)"], ["train.eps: glob(...)", "none match"]),
        (["sweep", "search.name=true"], ["must be text", "search.name=\"'true'\""]),
        (["sweep", "--nosuch"], ["--nosuch", "`plait sweep` has no such option", "KEY=VALUE"]),
        (["train", "--resolv"], ["--resolv", "Did you mean --resolve?"]),
        (["sweep", "--train.lr=1e-4"], ["--train.lr=1e-4", "Did you mean train.lr=1e-4?"]),
        (["sweep", "--data.path=x"], ["--data.path=x", "Did you mean data.path=x?"]),
        (["sweep", "--train/lr=1e-4"], ["--train/lr=1e-4", "Did you mean train.lr=1e-4?"]),
        (["sweep", "--lr=1e-4"], ["--lr=1e-4", "Did you mean train.lr=1e-4?"]),
        (["train", "--learning-rate", "1e-4"], ["--learning-rate", "Did you mean train.lr=?"]),
        (
            ["sweep", "model=tiny", "search.constraints={cost/device_seconds: '=< 60'}"],
            ["'=< 60'", "{cost/device_seconds: '<= 60'}"],
        ),
        (
            ["sweep", "model=tiny", "search.constraints={cost/device_seconds: '> .5e2 s'}"],
            ["'> .5e2 s'", "{cost/device_seconds: '>= .5e2'}"],
        ),
        (["sweep", "hydra/launcher=nothing"], ["hydra/launcher=nothing", "basic"]),
        (["sweep", "hydra/sweeper=basic", "adapter.rank=1,2"], ["hydra/sweeper"]),
        (["sweep", "experiment=mine"], ["unknown key experiment"]),
        (["sweep", "hydra.sweeper.n_trails=3"], ["unknown key hydra.sweeper.n_trails", "n_trials"]),
        (["train", "adapter.rank=1,2"], ["one adapter", "plait sweep"]),
        (["train", "adapter.rank=choice(1,2)"], ["one adapter", "plait sweep"]),
        (["train", "+sweeps=dropout_cost"], ["mode=bench", "plait bench"]),
        (["train", "adapter.rank=0"], ["adapter.rank=0", "at least 1"]),
        (["train", "model=tiny", "data=jsonl", "data.path=none.jsonl"], ["none.jsonl", "no such file"]),
        (["plan", "model=tiny", "data.task=nothing", "adapter.rank=1,2"], ["nothing"]),
        (["sweep", "train.lr=${nothing}"], ["nothing"]),
        (["sweep", "tracking=[null]"], ["tracking takes the name", "Available: local."]),
        (["sweep", "adapter=[nan]"], ["adapter takes the name", "Available: lora."]),
        (["sweep", "cluster.options=NaN"], ["cluster.options=nan", "group of keys"]),
        (["sweep", "engine.checkpoint_keep=http://u:secret@h"], ["http://u:***@h", "whole number"]),
        (["sweep", "adapter=http://u:secret@h"], ["adapter=http://u:***@h", "Available: lora"]),
        (["sweep", "engine=default,default"], ["engine is swept", "applies to the whole run"]),
        (["sweep", "search.metric=loss"], ["search.metric='loss'", "eval/loss"]),
        (["sweep", "search.sampler=sobol"], ["search.sampler=sobol", "Did you mean qmc?"]),
        (["sweep", "search.sampler=bayes"], ["search.sampler=bayes", "Did you mean tpe or gp?"]),
        (["bench", "nothing"], ["plait bench nothing", "quickstart"]),
    ],
    ids=lambda value: (
        " ".join(value)[:80] if isinstance(value, list) and value[0] in ("sweep", "train", "bench") else None
    ),
)
def test_bad_input_ends_with_status_2_and_a_remedy(
    arguments: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *arguments)
    assert status == 2
    said_first, *_ = (line for line in err.splitlines() if not line.startswith("Checking the search"))
    assert said_first.startswith("plait: ")
    assert "Traceback" not in err
    for words in said:
        assert words in err
    assert not list(tmp_path.iterdir()), "nothing is written for a run that cannot be"


def test_other_folders_are_no_config_groups(tmp_path: Path) -> None:
    (tmp_path / "private.yaml").write_text("name: 1")
    for given in (f"{tmp_path}=3", f"../../../../../../../..{tmp_path}=3", f"{tmp_path}/name=3"):
        for error in (explain_fault(ValueError("fault"), [given]), explain(_no_key(given), [given])):
            assert "private" not in str(error)
    assert "tiny" in str(explain_fault(ValueError("fault"), ["model=3"]))


def _no_key(given: str) -> ConfigCompositionException:
    return ConfigCompositionException(f"Could not override '{given.partition('=')[0]}'.")


# ---- hydra.sweeper.* ---------------------------------------------------------------------------------------

SEARCH: dict[str, Any] = {
    "trials": 8,
    "parallel": 8,
    "sampler": "tpe",
    "seed": 0,
    "direction": None,
    "name": None,
}
SEARCH |= {"storage": None, "params": {}, "max_failure_rate": 1.0, "sampler_options": {}}
LINKS: dict[str, Any] = {"n_trials": "${search.trials}", "direction": "${search.direction}", "_target_": "x"}
LINKS |= {"sampler": {"name": "${search.sampler}", "seed": "${search.seed}"}}


@pytest.mark.parametrize(
    ("sweeper", "changed"),
    [
        ({}, {}),
        ({"n_trials": 20}, {"trials": 20}),
        ({"n_jobs": 2}, {"parallel": 2}),
        ({"direction": "maximize"}, {"direction": "maximize"}),
        ({"direction": ["maximize"]}, {"direction": "maximize"}),
        ({"direction": ["minimize", "maximize"]}, {"direction": ["minimize", "maximize"]}),
        ({"storage": "sqlite:///s.db", "study_name": "s"}, {"storage": "sqlite:///s.db", "name": "s"}),
        ({"params": {"adapter.rank": "1,2"}}, {"params": {"adapter.rank": "1,2"}}),
        ({"max_failure_rate": 0.0}, {"max_failure_rate": 0.0}),
        ({"sampler": {"name": "random", "seed": 3}}, {"sampler": "random", "seed": 3}),
        (
            {"sampler": {"name": "tpe", "seed": None, "n_startup_trials": 4, "group": None}},
            {"sampler_options": {"n_startup_trials": 4}},
        ),
    ],
)
def test_values_of_hydra_sweeper_are_used_for_search(
    sweeper: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert merge(LINKS | sweeper, SEARCH, ()) == SEARCH | changed


@pytest.mark.parametrize(
    ("sweeper", "search", "given"),
    [
        ({"n_trials": 20}, {"trials": 9}, ()),
        ({"n_trials": 20}, {}, ("trials",)),
        ({"sampler": {"name": "random"}}, {"sampler": "grid"}, ()),
        ({"params": {"adapter.rank": "1,2"}}, {"params": {"train.lr": "1,2"}}, ()),
        ({"sampler": {"n_startup_trials": 4}}, {"sampler_options": {"n_startup_trials": 5}}, ()),
        ({"n_trails": 3}, {}, ()),
    ],
)
def test_two_different_values_are_an_error(
    sweeper: dict[str, Any], search: dict[str, Any], given: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError):
        merge(LINKS | sweeper, SEARCH | search, given)


def test_only_a_value_set_by_the_user_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody set what is as conf/ has it, whatever the dataclass says."""
    monkeypatch.setattr(sweeping, "_defaults", lambda: SEARCH | {"trials": 50})
    assert merge(LINKS | {"n_trials": 20}, SEARCH | {"trials": 50}, ())["trials"] == 20
    with pytest.raises(ConfigError):
        merge(LINKS | {"n_trials": 20}, SEARCH, ())


def test_the_same_value_in_both_places_is_accepted() -> None:
    assert merge(LINKS | {"n_trials": 9}, SEARCH | {"trials": 9}, ("trials",))["trials"] == 9


def test_every_sampler_has_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SAMPLERS:
        status, out, _ = run(capsys, "sweep", f"hydra/sweeper/sampler={name}", "--cfg", "hydra")
        assert status == 0
        assert yaml.safe_load(out)["hydra"]["sweeper"]["sampler"]["name"] == name
    assert SearchSettings().sampler == "tpe"


@pytest.mark.parametrize("space", SPACES.values())
def test_an_example_of_a_space_can_be_searched(space: str) -> None:
    (dimension,) = read_request([space], {}, {}).space.dimensions
    assert len(dimension.domain.probes) > 1
