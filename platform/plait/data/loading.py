"""What the rest of Plait calls: check a job's data, load it, judge answers to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plait.core.errors import ConfigError, DataError
from plait.core.jobs import DataSpec
from plait.core.samples import Int64, Sample, Split, TokenisedData
from plait.data.cache import content_digest, read_cached, write_cached
from plait.data.examples import Example, NamedFields
from plait.data.jsonl import JsonlFile, open_jsonl
from plait.data.options import JsonlOptions, SourceOptions, TaskOptions, parse_options
from plait.data.rendering import check_template, render
from plait.data.tasks import Task, check_task, generate_task
from plait.data.tokenising import LengthLimit, check_tokeniser, fit, tokenise, tokeniser_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_VERSION = 1  # raise it when the same rows and options come to give other samples
DEFAULT_SHARE = 0.1  # of a file's rows, for validation, where nothing is said

# These say where rows are or what is done with them later, not what the samples are.
_WITHOUT_EFFECT = ("path", "validation_path", "generate", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Examples of one origin, each with its place ("train.jsonl, line 7"), and their row numbers."""

    name: str
    examples: list[tuple[str, Example]]
    numbers: Int64

    @classmethod
    def of(cls, name: str, examples: list[tuple[str, Example]]) -> _Rows:
        return cls(name, examples, np.arange(len(examples), dtype=np.int64))

    def part(self, chosen: Int64) -> _Rows:
        return _Rows(self.name, [self.examples[index] for index in chosen], self.numbers[chosen])


def check_data(spec: DataSpec) -> None:
    """Raise what can be found without a tokeniser: wrong options, a task's refusal, a file's faults.

    Raises:
        ConfigError: an option is unknown or breaks its rule.
        DataError: a file or a row cannot be used, or there are too few rows for the split.
    """
    options = parse_options(spec)
    if isinstance(options, TaskOptions):
        check_task(options)
        _validation_count(options, options.size or 0, spec.source)
    else:
        _file_rows(options, _open(options))


def load_data(
    spec: DataSpec,
    tokeniser: PreTrainedTokenizerBase,
    *,
    max_length: int,
    capacity: int | None = None,
    cluster: str = "",
    cache: Path,
) -> TokenisedData:
    """The samples of ``spec``, from the cache where it holds them.

    Args:
        spec: of a job.
        tokeniser: of its model.
        max_length: most tokens of a sample that the model takes.
        capacity: most tokens of a sample that a microbatch holds; None: as many as the model takes.
        cluster: described cluster whose devices set the capacity, for messages; "": engine.capacity does.
        cache: folder of tokenised data.

    Raises:
        ConfigError, DataError: as :func:`check_data`; also a sample that is too long or without labels, and
            a chat template that is missing or refuses.
        StorageError: the cache cannot be written.
    """
    options = parse_options(spec)
    check_tokeniser(tokeniser)
    check_template(options, tokeniser)
    origin: Task | _Files
    origin = generate_task(options) if isinstance(options, TaskOptions) else _open(options)
    limit = LengthLimit(max_length, capacity, cluster)
    path = cache / f"{_cache_key(spec.source, options, origin.digest, tokeniser, limit.tokens)}.npz"
    data = read_cached(path)
    if data is None:
        train, validation = (_split(rows, options, tokeniser, limit) for rows in _rows(options, origin))
        data = TokenisedData(content_digest(train, validation), train, validation)
        write_cached(path, data)
    return data


def generation_limit(spec: DataSpec) -> int | None:
    """Most new tokens of an answer, where the job's answers are to be generated and judged; else None."""
    options = parse_options(spec)
    return options.max_new_tokens if isinstance(options, TaskOptions) and options.generate else None


def score(spec: DataSpec, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
    """The verifier's judgement of answers: 1 is right, lower is partly right or wrong.

    Args:
        rows: rows of the source that the answers belong to: ``data.validation.rows`` of the samples.
        texts: the answers, in the same order.

    Raises:
        ConfigError: the source has no verifier.
    """
    options = parse_options(spec)
    if not isinstance(options, TaskOptions):
        raise ConfigError(
            f"data.source={spec.source!r}",
            "This source has no verifier.",
            "Use data=reasoning_gym to score answers.",
        )
    return generate_task(options).score(rows, texts)


@dataclass(frozen=True, slots=True)
class _Files:
    train: JsonlFile
    validation: JsonlFile | None

    @property
    def digest(self) -> str:
        return self.train.digest + (self.validation.digest if self.validation else "")


def _open(options: JsonlOptions) -> _Files:
    validation = options.validation_path
    return _Files(
        open_jsonl(options.path),
        None if validation is None else open_jsonl(validation, "data.validation_path"),
    )


def _cache_key(
    source: str, options: SourceOptions, origin: str, tokeniser: PreTrainedTokenizerBase, max_length: int
) -> str:
    asked = {key: value for key, value in asdict(options).items() if key not in _WITHOUT_EFFECT}
    template = tokeniser.chat_template if options.template == "chat" else None
    content = [CACHE_VERSION, source, asked, origin, tokeniser_digest(tokeniser), template, max_length]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _rows(options: SourceOptions, origin: Task | _Files) -> tuple[_Rows, _Rows]:
    if isinstance(origin, Task):
        return _divide(_Rows.of(origin.name, origin.examples()), options)
    assert isinstance(options, JsonlOptions)
    return _file_rows(options, origin)


def _file_rows(options: JsonlOptions, files: _Files) -> tuple[_Rows, _Rows]:
    named = None
    if options.prompt_field is not None and options.completion_field is not None:
        named = NamedFields(options.prompt_field, options.completion_field)
    rows = _Rows.of(files.train.name, files.train.examples(options.size, named))
    if files.validation is None:
        return _divide(rows, options)
    own = _Rows.of(files.validation.name, files.validation.examples(None, named))
    there = len(own.examples)
    count = there if options.validation is None else _share(options.validation, there)
    if count > there:
        raise DataError(
            f"data.validation={count}", f"{own.name} has {there} rows.", "Give fewer, or null for all."
        )
    return rows, own.part(_chosen(there, count, options.seed))


def _divide(rows: _Rows, options: SourceOptions) -> tuple[_Rows, _Rows]:
    count = len(rows.examples)
    chosen = _chosen(count, _validation_count(options, count, rows.name), options.seed)
    return rows.part(np.setdiff1d(np.arange(count), chosen)), rows.part(chosen)


def _chosen(count: int, wanted: int, seed: int) -> Int64:
    """``wanted`` of ``count`` rows, in ascending order; more wanted rows contain the fewer."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:wanted]).astype(np.int64)


def _share(validation: float, count: int) -> int:
    return int(validation) if validation == 0 or validation >= 1 else max(1, round(count * validation))


def _validation_count(options: SourceOptions, count: int, name: str) -> int:
    wanted = _share(DEFAULT_SHARE if options.validation is None else options.validation, count)
    if wanted >= count:
        raise DataError(
            f"{name}: {count} rows, {wanted} of them for validation",
            "At least one row must be left to train on.",
            "Take more rows (data.size, data.path), or fewer for validation (data.validation).",
        )
    return wanted


def _split(
    rows: _Rows, options: SourceOptions, tokeniser: PreTrainedTokenizerBase, limit: LengthLimit
) -> Split:
    texts = [render(example, where, options, tokeniser) for where, example in rows.examples]
    samples = tokenise(texts, tokeniser)
    kept = fit(samples, [where for where, _ in rows.examples], options.overlong, limit)
    fitting = [
        (Sample(sample.tokens[:length], sample.labels[:length]), number)
        for sample, length, number in zip(samples, kept, rows.numbers, strict=True)
        if length is not None
    ]
    if rows.examples and not fitting:
        shortest = min(len(sample.tokens) for sample in samples)
        raise DataError(
            f"{rows.name}: none of {len(samples)} rows is left: the shortest has {shortest} tokens",
            f"{limit.rule(shortest)} data.overlong=drop leaves out what is longer.",
            f"{limit.remedy(shortest)}, or give data.overlong=truncate.",
        )
    return Split.of([sample for sample, _ in fitting], rows=[int(number) for _, number in fitting])
