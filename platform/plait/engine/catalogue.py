"""The data sets in use, each loaded once, by the jobs' data specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.core.jobs import DataSpec
from plait.core.messages import Generated
from plait.core.samples import TokenisedData

Scorer = Callable[[DataSpec, Sequence[int], Sequence[str]], Sequence[float]]


class DataCatalogue:
    """Loads each data set once and keeps it.

    An in-process worker shares the coordinator's; one in another process has its own.

    Args:
        load: returns the tokenised data of a spec (``plait.data.load_data`` bound to a tokeniser).
        generation_limit: returns the most new tokens of an answer, or None if none are generated.
        each_evaluation: returns whether answers are generated whenever the validation loss is measured.
        score: scores generated answers to rows of the source (``plait.data.score``).
    """

    def __init__(
        self,
        load: Callable[[DataSpec], TokenisedData],
        *,
        generation_limit: Callable[[DataSpec], int | None] = lambda _: None,
        each_evaluation: Callable[[DataSpec], bool] = lambda _: False,
        score: Scorer | None = None,
    ) -> None:
        self._load = load
        self.generation_limit = generation_limit
        self.each_evaluation = each_evaluation
        self._score = score
        self._by_spec: dict[DataSpec, TokenisedData] = {}

    def of(self, spec: DataSpec) -> TokenisedData:
        """The data of a spec."""
        if spec not in self._by_spec:
            self._by_spec[spec] = self._load(spec)
        return self._by_spec[spec]

    def longest(self, spec: DataSpec) -> int:
        """Tokens of the longest sample of a spec, in training or validation."""
        data = self.of(spec)
        return max(int(split.lengths.max(initial=0)) for split in (data.train, data.validation))

    def scores(self, spec: DataSpec, data: TokenisedData, answers: Generated) -> Sequence[float]:
        """The verifier's scores of answers to validation samples."""
        assert self._score is not None  # else no answers were asked for
        rows = [int(data.validation.rows[sample]) for sample in answers.samples]
        return self._score(spec, rows, answers.texts)
