"""`plait export`: an adapter as a PEFT folder, merged into its base model, or for llama.cpp."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.results import READING, store_parser, store_settings
from plait.core.errors import EXIT_DONE
from plait.utils.paths import as_path
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.core.settings import TrackingSettings
    from plait.tracking.leaderboard import JobRecord

FORMS = ("peft", "merged", "gguf")


def main(arguments: Sequence[str]) -> int:
    """Export an adapter."""
    parser = store_parser("export", "Export an adapter from the store.")
    add = parser.add_argument
    add("name", nargs="?", help="search, or MLflow run id of one adapter; default: the newest search")
    add("--to", type=as_path, required=True, metavar="DIR", help="the folder to create")
    add("--trial", type=int, metavar="N", help="trial of the search; default: the best")
    add(
        "--form",
        choices=FORMS,
        default="peft",
        help="peft (default), also for vLLM and SGLang; merged: the whole model; gguf: for llama.cpp",
    )
    known = parser.parse_args(arguments)
    say(READING)
    from plait.adapters.facts import not_in_peft
    from plait.tracking.results import export, free_folder

    settings = store_settings(known)
    if known.form == "peft":
        record, folder = export(settings, known.name, known.to, trial=known.trial)
        (folder / "README.md").write_text(_card(record, folder, "peft"), encoding="utf-8")
        if why := not_in_peft(_config(folder)["base_model_name_or_path"]):
            serves = f"plait serve {shlex.quote(str(known.to))}"
            say(f"{why} `{serves}` can serve the adapter; for other programs use --form merged.")
    else:
        free_folder(known.to)
        with tempfile.TemporaryDirectory(prefix="plait-export-") as name:
            record, folder = export(settings, known.name, Path(name) / "adapter", trial=known.trial)
            _write(known.form, settings, record, folder, known.to)
    print(f"{record.name}: {known.to}")
    return EXIT_DONE


def _write(form: str, settings: TrackingSettings, record: JobRecord, folder: Path, target: Path) -> None:
    say("Loading torch and the base model ...")
    from plait.adapters.exports import write_gguf, write_merged
    from plait.tracking.results import load_search
    from plait.tracking.trained import base_model, own_template, recorded_config

    search = load_search(settings, record.run_id)
    model, card = base_model(search, settings), _card(record, folder, form)
    if form == "merged":
        template = own_template(recorded_config(search, settings))
        write_merged(model, folder, target, card, template=template)
    else:
        write_gguf(model, folder, target, card)


def _config(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


def _card(record: JobRecord, folder: Path, form: str) -> str:
    from plait.adapters.facts import model_card, quantised_base

    config = _config(folder)
    facts = {
        **record.parameters,
        "base model quantised as": quantised_base(folder),
        "steps": record.step,
        "tokens": record.tokens,
        "eval loss": record.eval_loss,
        "accuracy": record.accuracy,
        "objective": record.objective,
    }
    shown = {key: value for key, value in facts.items() if value is not None}
    return model_card(config["base_model_name_or_path"], record.name, config["r"], shown, form=form)
