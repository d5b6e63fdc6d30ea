"""What the rest of Plait calls: check a job's data, load it through the cache, score answers to it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plait.core.errors import ConfigError, DataError, StorageError, choices
from plait.core.jobs import DataSpec
from plait.core.samples import Int64, Sample, Split, TokenisedData
from plait.data.examples import Example
from plait.data.sources import SOURCES, CommonOptions, Rows, VerifiedOptions, parse_options
from plait.data.tokenising import (
    LengthLimit,
    check_template,
    check_tokeniser,
    fit,
    render,
    tokenise,
    tokeniser_digest,
)
from plait.utils.files import new_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_VERSION = 1  # raise it when the same rows and options give other samples than before
_FIELDS = ("tokens", "labels", "offsets", "rows")


def check_data(spec: DataSpec) -> None:
    """Raise what can be found without a tokeniser: wrong options, a task's refusal, a file's faults.

    Raises:
        ConfigError: an option is unknown or breaks its rule.
        DataError: a file or a row cannot be used, or there are too few rows for the split.
    """
    source, options = SOURCES.get(spec.source), parse_options(spec)
    if source.check is None:
        _read(source.open(options), options)
    else:
        source.check(options)


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
        max_length: most tokens of a sample that the model takes.
        capacity: most tokens of a sample that a microbatch holds; None: as many as the model takes.
        cluster: described cluster whose devices set the capacity, for messages; "": engine.capacity does.

    Raises:
        ConfigError, DataError: as :func:`check_data`; also a sample that is too long or without labels, and
            a chat template that is missing or refuses.
        StorageError: the cache cannot be written.
    """
    options = parse_options(spec)
    check_tokeniser(tokeniser)
    check_template(options, tokeniser)
    rows = SOURCES.get(spec.source).open(options)
    limit = LengthLimit(max_length, capacity, cluster)
    path = cache / f"{_cache_key(spec, rows, tokeniser, limit.tokens)}.npz"
    data = read_cached(path)
    if data is None:
        train, validation = (_split(part, options, tokeniser, limit) for part in _read(rows, options))
        data = TokenisedData(content_digest(train, validation), train, validation)
        write_cached(path, data)
    return data


def generation_limit(spec: DataSpec) -> int | None:
    """Most new tokens of an answer, where the job's answers are to be generated and scored; else None."""
    options = parse_options(spec)
    return options.max_new_tokens if isinstance(options, VerifiedOptions) and options.generate else None


def score(spec: DataSpec, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
    """The verifier's scores of answers: 1 is right, lower is partly right or wrong.

    Args:
        rows: rows of the source that the answers belong to: ``data.validation.rows`` of the samples.
        texts: the answers, in the same order.

    Raises:
        ConfigError: the source has no verifier.
    """
    source = SOURCES.get(spec.source)
    if source.score is None:
        able = [name for name in SOURCES if SOURCES.get(name).score is not None]
        raise ConfigError(
            f"data.source={spec.source!r}",
            "This data source has no verifier.",
            f"Choose one that has: {choices(able)}.",
        )
    return source.score(parse_options(spec), rows, texts)


@dataclass(frozen=True, slots=True)
class _Part:
    """Examples for training or for validation, each with its place, and their row numbers."""

    name: str
    examples: list[tuple[str, Example]]
    numbers: Int64

    @classmethod
    def of(cls, rows: Rows, examples: list[tuple[str, Example]], numbers: Int64) -> _Part:
        return cls(rows.name, [examples[number] for number in numbers], numbers)


def _read(rows: Rows, options: CommonOptions) -> tuple[_Part, _Part]:
    """The examples for training and for validation."""
    examples = rows.read()
    count = len(examples)
    if rows.validation is None:
        options.check_split(count, rows.name)
        chosen = _chosen(count, options.validation_rows(count), options.seed)
        rest = np.setdiff1d(np.arange(count), chosen)
        return _Part.of(rows, examples, rest), _Part.of(rows, examples, chosen)
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
    return _Part.of(rows, examples, np.arange(count)), _Part.of(rows.validation, separate, chosen)


def _chosen(count: int, wanted: int, seed: int) -> Int64:
    """``wanted`` of ``count`` rows, in ascending order; more wanted rows contain the fewer."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:wanted]).astype(np.int64)


def _split(
    part: _Part, options: CommonOptions, tokeniser: PreTrainedTokenizerBase, limit: LengthLimit
) -> Split:
    texts = [render(example, where, options, tokeniser) for where, example in part.examples]
    samples = tokenise(texts, tokeniser)
    kept = fit(samples, [where for where, _ in part.examples], options.overlong, limit)
    fitting = [
        (Sample(sample.tokens[:length], sample.labels[:length]), number)
        for sample, length, number in zip(samples, kept, part.numbers, strict=True)
        if length is not None
    ]
    if part.examples and not fitting:
        shortest = min(len(sample.tokens) for sample in samples)
        raise DataError(
            f"{part.name}: none of {len(samples)} rows is left: the shortest has {shortest} tokens",
            f"{limit.rule(shortest)} data.overlong=drop leaves out longer rows.",
            f"{limit.remedy(shortest)}, or set data.overlong=truncate.",
        )
    return Split.of([sample for sample, _ in fitting], rows=[int(number) for _, number in fitting])


def _cache_key(spec: DataSpec, rows: Rows, tokeniser: PreTrainedTokenizerBase, max_length: int) -> str:
    options, without = parse_options(spec), SOURCES.get(spec.source).no_effect
    asked = {key: value for key, value in asdict(options).items() if key not in without}
    template = tokeniser.chat_template if options.template == "chat" else None
    origin = rows.digest + (rows.validation.digest if rows.validation else "")
    content = [CACHE_VERSION, spec.source, asked, origin, tokeniser_digest(tokeniser), template, max_length]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def content_digest(train: Split, validation: Split) -> str:
    """Digest of both splits' samples and of the rows they came from."""
    state = hashlib.sha256()
    for split in (train, validation):
        for name in _FIELDS:
            array = np.ascontiguousarray(getattr(split, name))
            state.update(f"{name}:{array.dtype.str}:{array.size};".encode())
            state.update(array.tobytes())
    return state.hexdigest()


def read_cached(path: Path) -> TokenisedData | None:
    """The data at ``path``; None where there is no file, or one that is truncated or altered."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            train, validation = (
                Split(**{name: archive[f"{part}.{name}"] for name in _FIELDS})
                for part in ("train", "validation")
            )
            digest = str(archive["digest"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    if digest != content_digest(train, validation):
        return None
    return TokenisedData(digest, train, validation)


def write_cached(path: Path, data: TokenisedData) -> None:
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    arrays = {f"train.{name}": getattr(data.train, name) for name in _FIELDS}
    arrays |= {f"validation.{name}": getattr(data.validation, name) for name in _FIELDS}
    try:
        with new_file(path) as file:
            np.savez(file, digest=np.array(data.digest), **arrays)
    except OSError as error:
        raise StorageError(
            f"{path.parent}: {error.strerror}",
            "Plait keeps tokenised data in a cache folder.",
            "Make the folder writable, free space on its disk, or choose another folder with PLAIT_CACHE.",
        ) from error
