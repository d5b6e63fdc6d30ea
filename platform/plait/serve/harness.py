"""lm-eval's tasks, answered by all adapters together.

A seam: lm-eval is optional, and only `plait eval` needs it.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import torch

from plait.core.errors import ConfigError, InputError, PlaitError
from plait.data.tokenising import messages_text
from plait.models.base import BaseModel
from plait.serve.engine import Engine
from plait.serve.requests import Completion, Request, Sampling
from plait.utils.progress import say
from plait.utils.spelling import did_you_mean

try:
    from lm_eval import evaluator, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(
        f"plait eval: {error}", "It needs lm-eval.", "Install it: pip install 'plait[eval]'."
    ) from error

BOOTSTRAPPED = 1000  # resamples for the standard error of metrics that have no formula for it
GREEDY_OPTIONS = {"do_sample", "temperature", "top_p", "top_k", "min_p"}  # of no effect without sampling
SAMPLING_OPTIONS = {"do_sample", "temperature", "top_p"}
NONE = "N/A"  # lm-eval's word for a standard error that there is no formula for


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks that lm-eval has loaded, with their rows.

    Attributes:
        loaded: as lm-eval's task manager gives them.
        limit: rows of each task; None: all.
        chat: whether prompts are messages in the chat template.
    """

    loaded: Mapping[str, Any]
    limit: int | None = None
    chat: bool = False


def load_tasks(
    names: Sequence[str], folder: Path | None, *, shots: int | None, limit: int | None, chat: bool
) -> Tasks:
    """Load tasks and groups of tasks by name or YAML file.

    Args:
        folder: of further tasks.
        shots: examples before each prompt; None: as each task says.

    Raises:
        ConfigError: one is unknown, or its rows cannot be read.
    """
    named = [name for name in names if Path(name).suffix not in (".yaml", ".yml")]
    manager = None
    try:
        with redirect_stdout(sys.stderr):
            manager = _manager(named, folder)
            _check_known(named, manager)
            say("Reading the tasks' rows; without a network, the Hugging Face hub is tried for minutes ...")
            loaded = manager.load(list(names))
    except ConfigError:
        raise
    except Exception as error:  # lm-eval, `datasets` and a task's own code raise anything
        raise _not_loaded(names, error, fetching=manager is not None) from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=(own or 0) if shots is None or own == 0 else shots)
    return Tasks(loaded, limit, chat)


def _not_loaded(names: Sequence[str], error: Exception, *, fetching: bool) -> ConfigError:
    said = next(iter(str(error).strip().splitlines()), "")[:300]
    value = f"--tasks {','.join(names)}: {type(error).__name__}: {said}"
    # What `datasets` raises when it does not reach its hub; a task's own file is simply not found.
    if fetching and isinstance(error, OSError) and type(error) is not FileNotFoundError:
        return ConfigError(
            value,
            "lm-eval knows the task, but its data is not on this machine and could not be fetched.",
            "Run this where the network reaches it, or copy the cache from there: HF_HOME names its folder.",
        )
    return ConfigError(
        value,
        "lm-eval must know each task, and its rows must have the fields that the task uses.",
        "`lm-eval ls tasks` lists its own; --include FOLDER adds others.",
    )


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """The tasks of the folder if all are there; else lm-eval's own, too, whose reading takes seconds."""
    if folder is None:
        return TaskManager()
    own = TaskManager(include_path=str(folder), include_defaults=False)
    return own if set(names) <= set(own.all_subtasks) else TaskManager(include_path=str(folder))


def _check_known(names: Sequence[str], manager: TaskManager) -> None:
    known = manager.all_tasks
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--tasks {name}",
                f"There is no task, group or tag of this name. {did_you_mean(name, known)}".rstrip(),
                "`lm-eval ls tasks` lists lm-eval's own; --include FOLDER adds others.",
            )


def evaluate(
    base: BaseModel,
    engine: Engine,
    tasks: Tasks,
    adapters: Sequence[str | None],
    longest: int | None = None,
) -> Iterator[tuple[str | None, dict[str, dict[str, float]] | PlaitError]]:
    """The results of each adapter (None: the base model) by task and metric, or why it has none.

    What lm-eval asks is answered for all adapters at once, when it is asked for the first of them.

    Args:
        longest: most tokens of a prompt with its answer; None: as many as the model takes.

    Raises:
        ConfigError: a task cannot be run.
    """
    model = JointModel(base, engine, adapters, longest)
    for adapter in adapters:
        model.adapter = adapter
        try:
            yield adapter, _results(model, tasks)
        except PlaitError as error:
            if isinstance(error, ConfigError):
                raise
            yield adapter, error


def _results(model: JointModel, tasks: Tasks) -> dict[str, dict[str, float]]:
    """What lm-eval finds, with the seeds that it has for a single model."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    try:
        with redirect_stdout(sys.stderr):
            found = evaluator.evaluate(
                model,
                tasks.loaded,
                limit=tasks.limit,
                bootstrap_iters=BOOTSTRAPPED,
                log_samples=False,
                apply_chat_template=tasks.chat,
                fewshot_as_multiturn=tasks.chat,
            )
    except PlaitError:
        raise
    except ValueError as error:  # as for tasks that run generated code, or see images
        inner = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)][1:]
        if any(
            name.partition(".")[0] == "plait" for name in inner
        ):  # a fault in the answers, not in the task
            raise
        raise ConfigError(f"--tasks: {error}", "lm-eval refuses to run this.") from error
    every = {**found["results"], **found.get("groups", {})}
    finite = {task: _metrics(f"{_shown(model.adapter)}: {task}", values) for task, values in every.items()}
    return {task: own for task, own in finite.items() if own}


def _metrics(whose: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite metrics by name: lm-eval's "acc,none" is acc, "exact_match,strict" is exact_match/strict."""
    found = {}
    for name, value in values.items():
        if "," not in name or str(value) == NONE:
            continue
        short = name.removesuffix(",none").replace(",", "/")
        if isinstance(value, Real) and math.isfinite(value):
            found[short] = float(value)
        else:
            say(f"{whose}: {short} is left out: {value!r:.60} is no finite number")
    return found


def _shown(adapter: str | None) -> str:
    return adapter or "the base model"


class JointModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model of lm-eval's that answers for one adapter after another, and asks the engine for all at once.

    Attributes:
        adapter: for which it answers.
    """

    def __init__(
        self, base: BaseModel, engine: Engine, adapters: Sequence[str | None], longest: int | None = None
    ) -> None:
        super().__init__()
        self.tokenizer = base.tokeniser
        self.adapter = adapters[0]
        self._adapters = adapters
        self._longest = base.max_length if longest is None else min(longest, base.max_length)
        self._engine = engine
        self._failed: dict[str | None, PlaitError] = {}
        self._asked: dict[str, list[Any]] = {}
        self._answers: dict[str, list[dict[str | None, Any]]] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has none."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Its name."""
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Messages as the tokeniser's template has them.

        Raises:
            ConfigError: it has none, or refuses them.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError("--chat", "The model's tokeniser has no chat template.", "Leave out --chat.")
        begun = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return messages_text(self.tokenizer, chat_history, **begun)
        except InputError as error:  # of a task's messages, whatever the adapter
            raise ConfigError(f"--chat: {error.value}", error.rule, "Leave out --chat.") from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; with the tokeniser's own first token, unless the text begins with it."""
        if add_special_tokens is None:
            begun = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
            options = {"add_special_tokens": False} if begun else {}
        else:
            options = {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **options)["input_ids"])

    # ---- what lm-eval asks ------------------------------------------------------------------------------

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether each of its tokens is the likeliest.

        Raises:
            ConfigError: one is empty.
        """
        for each in requests:
            if not any(each.args):
                raise _no_tokens(each.args)
        return self._own(
            "loglikelihood", requests, lambda: super(JointModel, self).loglikelihood(requests, disable_tqdm)
        )

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        """The log-probability of each text."""
        return self._own("rolling", requests, lambda: self._rolling(requests))

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """The text after each prompt."""
        return self._own("generate", requests, lambda: self._generate([each.args for each in requests]))

    def _own(self, kind: str, requests: Any, answer: Any) -> list[Any]:
        """The current adapter's answers; those of all are made when something is asked for the first time.

        Raises:
            PlaitError: it cannot be read, or its logits are not finite.
        """
        asked = [each.args for each in requests]
        if self._asked.get(kind) != asked:
            self._answers[kind] = answer()
            self._asked[kind] = asked
        if self.adapter in self._failed:
            raise self._failed[self.adapter]
        return [answers[self.adapter] for answers in self._answers[kind]]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[dict[str | None, Any]]:
        """By adapter: the log-probability of each continuation, and whether it is the likeliest."""
        for texts, _, continuation in requests:
            if not continuation:  # the engine would take a request without scored tokens for a prompt
                raise _no_tokens(texts)
        whole = [(*context, *continuation) for _, context, continuation in requests]
        tokens = [each[-(self._longest + 1) :] for each in whole]
        self._say_cut(whole, tokens)
        scored = [min(len(each[2]), len(own) - 1) for each, own in zip(requests, tokens, strict=True)]

        def request(place: int, adapter: str | None) -> Request:
            return Request(tokens[place], adapter, scored=scored[place])

        def answer(place: int, ended: Completion) -> tuple[float, bool]:
            wanted = tokens[place][-scored[place] :]
            likeliest = all(
                score.top[0][0] == token for score, token in zip(ended.scores, wanted, strict=True)
            )
            return sum(score.log_probability for score in ended.scores), likeliest

        return self._together(len(tokens), request, answer)

    def _rolling(self, requests: Any) -> list[dict[str | None, Any]]:
        windows = []
        for at, each in enumerate(requests):
            own = utils.get_rolling_token_windows(
                self.tok_encode(each.args[0]), self.prefix_token_id, self._longest, context_len=1
            )
            windows += [(at, *utils.make_disjoint_window(window)) for window in own]
        sums: list[dict[str | None, Any]] = [dict.fromkeys(self._adapters, 0.0) for _ in requests]
        for (at, *_), answers in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            for adapter, answer in answers.items():
                before = sums[at][adapter]
                sums[at][adapter] = None if None in (answer, before) else before + answer[0]
        return sums

    def _generate(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str | None, Any]]:
        samplings = [self._sampling(place, options) for place, (_, options) in enumerate(asked)]
        whole = [tuple(self.tok_encode(context) or [self.prefix_token_id]) for context, _ in asked]
        tokens = [
            own[-(self._longest - sampling.max_new_tokens) :]
            for own, sampling in zip(whole, samplings, strict=True)
        ]
        self._say_cut(whole, tokens)
        return self._together(
            len(tokens),
            lambda place, adapter: Request(tokens[place], adapter, samplings[place]),
            lambda _, ended: ended.text,
        )

    def _sampling(self, seed: int, given: Mapping[str, Any]) -> Sampling:
        """How tokens are chosen, by lm-eval's options.

        Raises:
            ConfigError: one is not supported, or no room is left for the prompt.
        """
        options = normalize_gen_kwargs(dict(given), 256)
        stop, most = options.pop("until", None) or [], options.pop("max_gen_toks")
        sampled = options.get("do_sample") and options.get("temperature", 0.0) > 0
        unknown = sorted(set(options) - (SAMPLING_OPTIONS if sampled else GREEDY_OPTIONS))
        if unknown:
            raise ConfigError(
                f"generation_kwargs: {', '.join(unknown)}", "Plait's engine does not support this."
            )
        if options.get("do_sample") and "temperature" not in options:
            raise ConfigError(
                "generation_kwargs: do_sample without temperature",
                "Sampling needs a temperature.",
                "Set temperature, or do_sample: false for the likeliest tokens.",
            )
        if most >= self._longest:
            raise ConfigError(
                f"generation_kwargs: max_gen_toks={most}",
                f"A prompt and its answer have at most {self._longest} tokens: no prompt would be left.",
                "Set a smaller max_gen_toks in the task.",
            )
        stops = tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)
        if not sampled:
            return Sampling(most, stop=stops)
        return Sampling(most, options["temperature"], options.get("top_p", 1.0), seed, stop=stops)

    def _say_cut(self, whole: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]) -> None:
        cut = sum(len(own) < len(each) for each, own in zip(whole, kept, strict=True))
        if cut:
            say(
                f"{cut} of {len(whole)} prompts lose their beginning: with the answer, a prompt may have "
                f"{self._longest} tokens"
            )

    def _together(self, count: int, request: Any, answer: Any) -> list[dict[str | None, Any]]:
        """The answers of all adapters to each request; None where one has failed, which ends no other."""
        requests = (
            ((adapter, place), request(place, adapter))
            for adapter in self._adapters
            for place in range(count)
            if adapter not in self._failed
        )
        found: list[dict[str | None, Any]] = [dict.fromkeys(self._adapters) for _ in range(count)]
        for (adapter, place), update in self._engine.fed(requests):
            if update.error is not None:
                self._failed[adapter] = update.error
            elif update.ended is not None and update.ended.reason == "not finite":
                self._failed[adapter] = InputError(
                    f"{_shown(adapter)}: its logits are not finite", "It has no results."
                )
            elif update.ended is not None:
                found[place][adapter] = answer(place, update.ended)
        return found


def _no_tokens(texts: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"--tasks: the answer {texts[1]!r} after {texts[0][-40:]!r} has no tokens",
        "Each answer to choose from has at least one token of its own.",
        "Correct the task's row, or leave the task out.",
    )
