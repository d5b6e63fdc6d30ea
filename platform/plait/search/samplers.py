"""The samplers by name, each registered once with what it needs and can do.

To add one, register a :class:`Sampler` with ``SAMPLERS.add``, in this module or in one that another package
names in the entry-point group ``plait.samplers``. Optuna is imported only when a sampler is made, so that an
impossible choice is refused immediately.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.core.errors import SearchError, choices
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Space
from plait.utils.registry import Registry

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler as it is registered.

    Attributes:
        make: makes Optuna's sampler from keyword arguments: ``seed`` and ``search.sampler_options``.
        several_objectives: it supports several objectives.
        constraints: it uses ``search.constraints``, or learns from no trial.
        learns_from_earlier: it can learn from trials of another study (``search.prior``).
        source_trials: it takes these in an argument ``source_trials``, not among the study's trials.
        choices: it supports choices, not only ranges.
        finite: it needs a space with a finite number of combinations.
        least_keys: the least number of searched keys.
        one_sequence: its suggestions are numbered in one sequence, so its seed must be the same for all
            trials. It takes an argument ``independent_sampler`` for values outside the sequence.
        one_thread: it is many times slower with more than one thread of torch.
        package: what must be installed for it, from the extra "samplers".
    """

    make: Callable[..., BaseSampler]
    several_objectives: bool = True
    constraints: bool = True
    learns_from_earlier: bool = False
    source_trials: bool = False
    choices: bool = True
    finite: bool = False
    least_keys: int = 0
    one_sequence: bool = False
    one_thread: bool = False
    package: str = ""


ELSEWHERE = {  # names in Weights & Biases, Ray Tune, scikit-optimize and Ax
    **dict.fromkeys(("bayes", "bayesian", "bayesopt", "bo", "skopt", "hyperopt"), "tpe or gp"),
    **dict.fromkeys(("gaussianprocess", "botorch", "ax"), "gp"),
    **dict.fromkeys(("sobol", "halton", "lhs", "quasirandom"), "qmc"),
    **dict.fromkeys(("evolution", "genetic", "nsga2"), "nsgaii"),
}
SAMPLERS: Registry[Sampler] = Registry(
    "sampler", key="search.sampler", group="plait.samplers", elsewhere=ELSEWHERE
)


def of_optuna(name: str, **defaults: Any) -> Callable[..., BaseSampler]:
    """A function that makes a sampler of ``optuna.samplers``."""

    def make(**options: Any) -> BaseSampler:
        import optuna

        sampler: BaseSampler = getattr(optuna.samplers, name)(**defaults | options)
        return sampler

    return make


SAMPLERS.add("tpe", Sampler(of_optuna("TPESampler"), learns_from_earlier=True))
SAMPLERS.add("random", Sampler(of_optuna("RandomSampler")))
# No combination is suggested twice (``suggest.Suggester``), so a random sampler goes through all of them.
SAMPLERS.add("grid", Sampler(of_optuna("RandomSampler"), finite=True))
SAMPLERS.add(
    "cmaes",
    Sampler(
        of_optuna("CmaEsSampler"),
        several_objectives=False,
        constraints=False,
        learns_from_earlier=True,
        source_trials=True,  # Nomura et al., AAAI 2021, warm-starting CMA-ES
        choices=False,
        least_keys=2,
        package="cmaes",
    ),
)
SAMPLERS.add(
    "qmc",
    Sampler(of_optuna("QMCSampler", warn_asynchronous_seeding=False), choices=False, one_sequence=True),
)
SAMPLERS.add("gp", Sampler(of_optuna("GPSampler"), learns_from_earlier=True, one_thread=True))
SAMPLERS.add("nsgaii", Sampler(of_optuna("NSGAIISampler")))


def check_sampler(settings: SearchSettings, space: Space) -> None:
    """Check that the sampler exists and supports the search.

    Raises:
        ConfigError: the sampler does not exist.
        SearchError: it does not support the search.
    """
    name = settings.sampler
    sampler = SAMPLERS.get(name)
    if settings.prior is not None and not sampler.learns_from_earlier:
        raise SearchError(
            f"search.prior={settings.prior} with search.sampler={name}",
            "This sampler cannot learn from an earlier study.",
            f"Choose one of {_able('learns_from_earlier')}, or leave out search.prior.",
        )
    if len(settings.objectives) > 1 and not sampler.several_objectives:
        raise SearchError(
            f"search.sampler={name} with {len(settings.objectives)} objectives",
            "This sampler supports only one objective.",
            f"Choose one of {_able('several_objectives')}, or use a single search.metric.",
        )
    if settings.constraints and not sampler.constraints:
        raise SearchError(
            f"search.sampler={name} with search.constraints",
            "This sampler does not support constraints.",
            f"Choose one of {_able('constraints')}.",
        )
    _check_space(name, sampler, space)
    if sampler.package and importlib.util.find_spec(sampler.package) is None:
        raise SearchError(
            f"search.sampler={name}",
            f"This sampler needs the package {sampler.package}.",
            "Install it: pip install 'plait[samplers]'.",
        )


def _check_space(name: str, sampler: Sampler, space: Space) -> None:
    for dimension in space.dimensions:
        key, domain = dimension.name, dimension.domain
        if sampler.finite and domain.count is None:
            raise SearchError(
                f"search.sampler={name} with {key}: {domain}",
                f"The {name} sampler needs a finite number of values.",
                f"Write {key}=choice(...) or range(...), or use another sampler.",
            )
        if not sampler.choices and isinstance(domain, Choice):
            raise SearchError(
                f"search.sampler={name} with {key}: choice",
                f"The {name} sampler cannot learn from choices, only from ranges of numbers.",
                f"Write {key} as range(...) or interval(...), or use search.sampler=tpe.",
            )
    if len(space.dimensions) < sampler.least_keys:
        raise SearchError(
            f"search.sampler={name} with {len(space.dimensions)} searched keys",
            f"This sampler needs at least {sampler.least_keys}.",
            "Sweep another key, or use search.sampler=tpe.",
        )


def _able(capability: str) -> str:
    return choices([name for name in SAMPLERS if getattr(SAMPLERS.get(name), capability)])
