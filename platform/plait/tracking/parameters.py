"""The parameters of jobs: as text, as MLflow keeps them, and which of them differ between jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_WORDS: Mapping[str, object] = {"None": None, "True": True, "False": False}


def parameter_text(value: object) -> str:
    """A parameter's value as MLflow keeps it: words and numbers as they are, the rest as JSON."""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def parameter_value(text: str) -> Any:
    """The value that :func:`parameter_text` wrote, as far as text can tell: lists for tuples."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


class Varying:
    """Which parameters are not the same in all jobs, told without comparing all of them each time.

    Values count as the same that MLflow keeps as the same text: a list read back from it stands for the
    tuple that another job has.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Mapping[str, Any]] = {}
        self._first: dict[str, str] = {}  # text of the first job's value; keys as jobs name them
        self._found: set[str] = set()

    @property
    def keys(self) -> list[str]:
        """In the order in which jobs name them."""
        return [key for key in self._first if key in self._found]

    def add(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Take in a job that is not known yet."""
        absent = parameter_text(None)
        for key, value in parameters.items():
            if key not in self._first:
                self._first[key] = absent if self._jobs else parameter_text(value)
        for key, text in self._first.items():
            if key not in self._found and parameter_text(parameters.get(key)) != text:
                self._found.add(key)
        self._jobs[name] = parameters

    def update(self, jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The keys for these jobs, by name. All are compared only where one is gone or has changed."""
        known = all(self._take(name, parameters) for name, parameters in jobs.items())
        if not known or len(self._jobs) != len(jobs):
            self._jobs, self._first, self._found = {}, {}, set()
            for name, parameters in jobs.items():
                self.add(name, parameters)
        return self.keys

    def _take(self, name: str, parameters: Mapping[str, Any]) -> bool:
        """Take in a job; False where it is known with other parameters."""
        known = self._jobs.get(name)
        if known is None:
            self.add(name, parameters)
        elif known is not parameters:
            self._jobs[name] = parameters
        return known is None or known is parameters or known == parameters
