"""The functions that the rest of Plait calls: check a job's data, load it through the cache, score
answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plait.core.errors import DataError
from plait.core.jobs import DataSpec, JobSpec
from plait.core.samples import Int64, RowCounts, Sample, Share, Split, TokenisedData
from plait.data.cache import content_digest, read_cached, write_cached
from plait.data.examples import Example
from plait.data.overlong import Candidate, LengthLimit, Use, described, fit
from plait.data.scoring import check_scorer
from plait.data.sources import SOURCES, CommonOptions, Rows, VerifiedOptions, parse_options
from plait.data.tokenising import Renderer, check_tokeniser, tokenise, tokeniser_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES_VERSION = 4  # raise it when the same rows and options give other samples than before, or an error


def check_data(spec: DataSpec) -> None:
    """Check the data as far as possible without a tokeniser: options, a task's settings, a file's rows.

    Raises:
        ConfigError: an option is unknown or breaks its rule.
        DataError: a file or a row cannot be used, or there are too few rows for the split.
    """
    source, options = SOURCES.get(spec.source), parse_options(spec)
    check_scorer(options, spec.source)
    if source.check is None:
        _read(source.open(options), options)
    else:
        source.check(options)


def check_jobs(jobs: Sequence[JobSpec]) -> None:
    """Check every data set of these jobs, as :func:`check_data` does. No large library is imported for it, so
    that a missing file is reported at once."""
    for spec in dict.fromkeys(job.data for job in jobs):
        check_data(spec)


def load_data(
    spec: DataSpec,
    tokeniser: PreTrainedTokenizerBase,
    *,
    max_length: int,
    capacity: int | None = None,
    cluster: str = "",
    key: str = "engine.capacity",
    cache: Path,
) -> TokenisedData:
    """The samples of ``spec``, from the cache if it holds them.

    Args:
        max_length: most tokens of a sample that the model accepts; an option says what happens to longer
            ones.
        capacity: most tokens of a sample that fit into a microbatch; None: as many as the model accepts.
        cluster: described cluster whose devices set the capacity, for messages; "": ``key`` does.

    Raises:
        ConfigError, DataError: as :func:`check_data`; also a chat template that is missing or refuses, a
            sample that does not fit into a microbatch, and rows of which none can be trained on.
        StorageError: the cache cannot be written.
    """
    options = parse_options(spec)
    check_tokeniser(tokeniser)
    renderer = Renderer.of(options, tokeniser)
    rows = SOURCES.get(spec.source).open(options)
    limit = LengthLimit(max_length, capacity, cluster, key)
    path = cache / f"{_cache_key(spec, rows, renderer, max_length)}.npz"
    data = read_cached(path)
    if data is None:
        parts = _read(rows, options)
        train = _split([train for train, _ in parts], renderer, limit, "training")
        validation = _split([validation for _, validation in parts], renderer, limit, "validation")
        data = TokenisedData(content_digest(train, validation), train, validation)
        write_cached(path, data)
    limit.check_capacity(max(int(split.lengths.max(initial=0)) for split in (data.train, data.validation)))
    return data


def describe_rows(spec: DataSpec, data: TokenisedData, max_length: int) -> str:
    """One line about rows that are truncated or left out; "" if there are none."""
    counts = data.train.counts + data.validation.counts
    if not (said := list(described(counts, max_length))):
        return ""
    return f"Data {_name(spec)}: of {counts.rows:,} rows, {'; '.join(said)}."


def count_rows(spec: DataSpec, data: TokenisedData) -> str:
    """A data set by the numbers of its samples: "train.jsonl with 90 rows to train on, 10 for validation"."""
    return f"{_name(spec)} with {len(data.train):,} rows to train on, {len(data.validation):,} for validation"


def _name(spec: DataSpec) -> str:
    options = spec.mapping()
    return next((str(options[key]) for key in ("path", "id", "task") if options.get(key)), spec.source)


def generation_limit(spec: DataSpec) -> int | None:
    """Most new tokens of an answer if the job's answers are generated and scored, else None."""
    options = parse_options(spec)
    return options.max_new_tokens if isinstance(options, VerifiedOptions) and options.generate else None


def each_evaluation(spec: DataSpec) -> bool:
    """Whether answers are generated and scored whenever the validation loss is measured."""
    options = parse_options(spec)
    return isinstance(options, VerifiedOptions) and options.generate and options.generate_at == "evaluation"


@dataclass(frozen=True, slots=True)
class _Part:
    """Examples of one source for training or validation, each with its place, and their row numbers."""

    examples: list[tuple[str, Example]]
    numbers: Int64
    weight: float | None

    @classmethod
    def of(cls, rows: Rows, examples: list[tuple[str, Example]], numbers: Int64, first: int) -> _Part:
        return cls([examples[number] for number in numbers], numbers + first, rows.weight)


def _read(rows: Rows, options: CommonOptions) -> list[tuple[_Part, _Part]]:
    """The examples of each source for training and for validation; rows are numbered in one sequence."""
    parts: list[tuple[_Part, _Part]] = []
    first = 0
    for each in rows.parts or (rows,):
        examples = each.read()
        parts.append(_divide(each, examples, options, first))
        first += len(examples)
    return parts


def _divide(
    rows: Rows, examples: list[tuple[str, Example]], options: CommonOptions, first: int
) -> tuple[_Part, _Part]:
    """The examples for training and for validation, numbered from ``first``."""
    count = len(examples)
    if rows.validation is None:
        options.check_split(count, rows.name)
        chosen = _chosen(count, options.validation_rows(count), options.seed)
        rest = np.setdiff1d(np.arange(count), chosen)
        return _Part.of(rows, examples, rest, first), _Part.of(rows, examples, chosen, first)
    separate = rows.validation.read()
    there = len(separate)
    wanted = there if options.validation is None else options.validation_rows(there)
    if wanted > there:
        raise DataError(
            f"data.validation={wanted}",
            f"{rows.validation.name} has {there} rows.",
            "Set a smaller number, or null to use all of them.",
        )
    chosen = _chosen(there, wanted, options.seed)
    return _Part.of(rows, examples, np.arange(count), first), _Part.of(rows, separate, chosen, first)


def _chosen(count: int, wanted: int, seed: int) -> Int64:
    """``wanted`` of ``count`` rows, in ascending order; a larger choice contains every smaller one."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:wanted]).astype(np.int64)


def _split(parts: Sequence[_Part], renderer: Renderer, limit: LengthLimit, use: Use) -> Split:
    samples: list[tuple[Sample, int]] = []
    counts, shares = RowCounts(), list[Share]()
    for part in parts:
        kept, own = fit(list(_candidates(part, renderer, limit)), renderer.options.overlong, limit, use)
        samples += kept
        counts += own
        if part.weight is not None:
            shares.append(Share(len(kept), part.weight))
    return Split.of(
        [sample for sample, _ in samples], [number for _, number in samples], counts, tuple(shares)
    )


def _candidates(part: _Part, renderer: Renderer, limit: LengthLimit) -> Iterator[Candidate]:
    texts = [renderer.render(example, where) for where, example in part.examples]
    samples = tokenise(texts, renderer.tokeniser, limit.characters)
    for (where, _), text, sample, number in zip(part.examples, texts, samples, part.numbers, strict=True):
        yield Candidate(sample, where, int(number), len(text.text))


def _cache_key(spec: DataSpec, rows: Rows, renderer: Renderer, max_length: int) -> str:
    without = {*SOURCES.get(spec.source).no_effect, "chat_template"}
    asked = {key: value for key, value in asdict(renderer.options).items() if key not in without}
    origin = rows.digest + (rows.validation.digest if rows.validation else "")
    tokeniser = tokeniser_digest(renderer.tokeniser)
    content = [SAMPLES_VERSION, spec.source, asked, origin, tokeniser, renderer.template, max_length]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
