"""`plait generate`: answers of a search's adapters, side by side with the base model's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plait.cli.parser import Parser, check_least
from plait.cli.results import READING, store_parser, store_settings
from plait.core.errors import EXIT_DONE, EXIT_FAILED_JOBS, ConfigError, InputError, PlaitError, SearchError
from plait.utils.paths import as_path, user_path
from plait.utils.progress import say

# Other imports take seconds, for which help and bad input do not wait.
if TYPE_CHECKING:
    from plait.core.settings import ModelSettings, TrackingSettings
    from plait.models.base import BaseModel
    from plait.serve.folders import FolderAdapters
    from plait.serve.requests import Completion, Sampling
    from plait.tracking.leaderboard import JobRecord
    from plait.tracking.results import SearchResult

Given = TypeVar("Given")
Used = TypeVar("Used")
BASE = "base"
SHOWN = 3  # trials side by side, if none is named
POOL_TOKENS = 32_768  # tokens whose keys and values the pool would hold if it held no adapters


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is shown, and its tokens; None: they are still to be made of the text."""

    text: str
    tokens: tuple[int, ...] | None = None


def main(arguments: Sequence[str]) -> int:
    """Generate texts with a search's adapters and the base model."""
    known = _parser().parse_args(arguments)
    from plait.serve.requests import Sampling

    sampling = Sampling(
        known.max_new_tokens, known.temperature, known.top_p, known.seed, stop=tuple(known.stop)
    )
    prompts = [Prompt(text) for text in [*known.prompt, *(_file_prompts(known.file) if known.file else ())]]
    for text in (*known.prompt, *known.stop):
        _check_unicode(text)
    check_least(known, validation=0, best=1)
    if not prompts and not known.validation:
        raise ConfigError(
            "plait generate", "There is no prompt.", "Give --prompt TEXT, --file FILE or --validation N."
        )
    settings = store_settings(known)
    say(READING)
    from plait.tracking.results import chosen, leading, load_search
    from plait.tracking.trained import base_model, own_template, recorded_config

    search = load_search(settings, known.name)
    named = [chosen(search, trial) for trial in dict.fromkeys(known.trial or ())]
    records = named or leading(search, known.best or SHOWN)
    config = recorded_config(search, settings)
    folders = fetched_adapters(search, records, settings)
    of_chat = config.get("data", {}).get("template") == "chat"  # as the search rendered its rows
    as_chat = known.chat or (of_chat and not known.plain)
    template = own_template(config) if as_chat else None  # its file may be gone
    base, loaded = load_base(base_model(search, settings), folders, template=template)
    if known.validation:
        prompts += _validation_prompts(known.validation, config, base, records)
    if as_chat:
        prompts = _as_messages(prompts, base)
    adapters = [*([] if known.no_base else [None]), *loaded.names]
    trials = {record.name: record for record in records}
    rows: list[dict[str, Any]] = []
    for prompt, answers in zip(prompts, _answers(base, loaded, prompts, adapters, sampling), strict=True):
        own = _rows(prompt, answers, trials)
        _show(own, as_json=known.json)
        rows += own
    if known.table:
        from plait.tracking.results import record_texts

        record_texts(settings, search, rows)
    asked = bool(named) or known.best is not None  # else those that there are will do
    return EXIT_FAILED_JOBS if asked and len(loaded.names) < len(records) else EXIT_DONE


def _parser() -> Parser:
    parser = store_parser("generate", "Generate texts with a search's adapters and with the base model.")
    parser.add_argument("name", nargs="?", help="name of the search; default: the newest")
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given several times")
    add("--file", type=as_path, help="prompts: lines of text, or .jsonl with a key `prompt` in each row")
    add("--validation", type=int, default=0, metavar="N", help="the first N prompts of the validation rows")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--trial", type=int, action="append", metavar="N", help="a trial; may be repeated")
    which.add_argument(
        "--best",
        type=int,
        metavar="N",
        help=f"the N best trials; default: {SHOWN}, or fewer if some cannot be used",
    )
    add("--no-base", action="store_true", help="without the base model's own text")
    parser.add_sampling(128)
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be given several times")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="prompts are messages in the chat template")
    form.add_argument(
        "--plain", action="store_true", help="use prompts as they are; default: by data.template"
    )
    add("--json", action="store_true", help="one line of JSON for each text")
    add("--table", action="store_true", help="add the texts to the search's run in MLflow, as a table")
    return parser


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python keeps an argument's other bytes as halves of surrogate pairs
        raise InputError(f"{text!a}", "A prompt and a stop text are valid UTF-8.") from error


def _file_prompts(path: Path) -> list[str]:
    """The prompts of a file, without empty lines."""
    file = user_path(path)
    if not file.is_file():
        raise ConfigError(f"--file {path}", f"There is no file {file.resolve()}.", "Give an existing file.")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # other separators may be part of a text
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, byte {error.start}", "A file of prompts is text in UTF-8.") from error
    kept = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in kept]
    found = []
    for number, line in kept:
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            text = None
        if not isinstance(text, str):
            raise InputError(f"{path}, row {number}", 'A row is like {"prompt": "a text"}.')
        found.append(text)
    return found


def fetched_adapters(
    search: SearchResult, records: Sequence[JobRecord], settings: TrackingSettings
) -> dict[str, Path]:
    """The folders of trials' adapters by name; of one that cannot be fetched it is said why.

    Raises:
        PlaitError: none can be fetched.
    """
    from plait.tracking.trained import adapter_folder

    return _usable(
        {record.name: record for record in records}, lambda _, one: adapter_folder(search, one, settings)
    )


def add_adapters(adapters: FolderAdapters, folders: Mapping[str, Path]) -> None:
    """Add the adapters of folders; of one that cannot be used it is said why.

    Raises:
        PlaitError: none can be used.
    """
    _usable(folders, adapters.add)


def _usable(given: Mapping[str, Given], use: Callable[[str, Given], Used]) -> dict[str, Used]:
    """What comes of those that can be used. An error costs its own alone, unless none is left."""
    found: dict[str, Used] = {}
    for name, each in given.items():
        try:
            found[name] = use(name, each)
        except PlaitError as error:
            if len(given) == 1:
                raise
            print(f"{name}: {error}", file=sys.stderr)
    if given and not found:
        raise SearchError(f"adapters {', '.join(given)}", "None of them can be used; see above.")
    return found


def load_base(
    model: ModelSettings,
    folders: Mapping[str, Path],
    *,
    most: int | None = None,
    template: str | None = None,
) -> tuple[BaseModel, FolderAdapters]:
    """The base model on this machine's device, and those adapters of folders that can be used.

    Args:
        most: adapters that there may be; None: any number.
        template: the chat template; None: the tokeniser's own.

    Raises:
        PlaitError: none can be used.
    """
    say("Loading torch and the base model ...")
    import torch

    from plait.core.settings import AUTO
    from plait.engine.devices import choose_device, choose_dtype, choose_kernels, usual_threads
    from plait.models.load import load_model
    from plait.serve.folders import FolderAdapters
    from plait.utils.paths import cache_dir

    torch.set_num_threads(usual_threads())  # torch does not know a container's limit
    device = choose_device("auto")
    model = replace(model, dtype=choose_dtype(device)) if model.dtype == AUTO else model
    base = load_model(model, cache=cache_dir(), device=device)
    base.install(backend=choose_kernels("auto", device, base.dtype))
    if template is not None:
        base.tokeniser.chat_template = template
    adapters = FolderAdapters(base, most=most)
    add_adapters(adapters, folders)
    return base, adapters


def _validation_prompts(
    count: int, config: Mapping[str, Any], base: BaseModel, records: Sequence[JobRecord]
) -> list[Prompt]:
    """The prompts of the first validation rows, of the data that all trials share.

    Raises:
        SearchError: trials have data of their own, or no validation row has a prompt.
    """
    from plait.config.build import job_of
    from plait.data.loading import load_data
    from plait.tracking.values import parameter_text
    from plait.utils.paths import cache_dir

    shared = {f"data.{key}": parameter_text(value) for key, value in config["data"].items()}
    own = sorted(
        key
        for record in records
        for key, value in record.parameters.items()
        if key in shared and parameter_text(value) != shared[key]
    )
    if own:
        raise SearchError(
            f"--validation: {own[0]} varies from trial to trial",
            "The prompts of validation rows must be those of all trials.",
            "Give the prompts with --prompt or --file, or one trial with the search's own data: --trial N.",
        )
    spec = job_of("generate", config).data
    rows = load_data(spec, base.tokeniser, max_length=base.max_length, cache=cache_dir()).validation
    tokens = [rows.prompt(sample) for sample in range(len(rows))]
    found = [Prompt(str(base.tokeniser.decode(list(each))), each) for each in tokens if len(each) > 1]
    if not found:
        raise SearchError(
            "--validation: no row has a prompt", "Its rows are plain texts, which are trained on as a whole."
        )
    return found[:count]


def _as_messages(prompts: Sequence[Prompt], base: BaseModel) -> list[Prompt]:
    """The prompts whose tokens are not known yet, in the chat template with the assistant's turn begun."""
    from plait.data.tokenising import messages_text

    if not base.tokeniser.chat_template:
        raise ConfigError("--chat", "The model's tokeniser has no chat template.", "Use --plain.")
    made = []
    for prompt in prompts:
        if prompt.tokens is not None:
            made.append(prompt)
            continue
        text = messages_text(base.tokeniser, [{"role": "user", "content": prompt.text}])
        tokens = base.tokeniser(text, add_special_tokens=False)["input_ids"]
        made.append(Prompt(prompt.text, tuple(tokens)))
    return made


def _answers(
    base: BaseModel,
    loaded: FolderAdapters,
    prompts: Sequence[Prompt],
    adapters: Sequence[str | None],
    sampling: Sampling,
) -> Iterator[dict[str | None, Completion]]:
    """The texts of each prompt by adapter, all generated together."""
    from plait.serve.engine import Engine, needed_tokens
    from plait.serve.requests import Request

    tokens = [
        tuple(base.tokeniser(each.text)["input_ids"]) if each.tokens is None else each.tokens
        for each in prompts
    ]
    requests = [Request(own, adapter, sampling) for own in tokens for adapter in adapters]
    most = max(needed_tokens(each, base.max_length) for each in requests)
    engine = Engine(base, loaded, pool_tokens=max(POOL_TOKENS, most))
    ended = iter(engine.complete(requests))
    for _ in prompts:
        yield dict(zip(adapters, islice(ended, len(adapters)), strict=True))


def _rows(
    prompt: Prompt, answers: Mapping[str | None, Completion], trials: Mapping[str, JobRecord]
) -> list[dict[str, Any]]:
    """The texts of a prompt; the trial of the base model's is None."""
    return [
        {
            "prompt": prompt.text,
            "trial": None if adapter is None else trials[adapter].trial,
            "text": answer.text,
            "reason": answer.reason,
            "tokens": len(answer.tokens),
        }
        for adapter, answer in answers.items()
    ]


def _show(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the texts of one prompt."""
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        print(f"prompt: {rows[0]['prompt']}")
        for row in rows:
            whose = BASE if row["trial"] is None else f"trial {row['trial']}"
            print(f"{whose}: {_shown_text(row)}")
        print()
    sys.stdout.flush()


def _shown_text(row: Mapping[str, Any]) -> str:
    """A text, or why there is none, or no more of it."""
    broken = bool(row["reason"] == "not finite")
    if row["text"].strip():
        return f"{row['text']}" + " (here its logits are not finite)" * broken
    if broken:
        return "(no text: its logits are not finite)"
    return f"(no text: {row['tokens']} tokens, all blank)" if row["tokens"] else "(no text: it ends at once)"
