"""Optuna samplers that propose points of a ``Space``, and never the same point twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial

from autotune.planning.space import Space
from autotune.records.settings import FlagValue, Settings

Taken = Callable[[], set[Settings]]
"""Settings that were launched already."""


def distributions(space: Space) -> dict[str, CategoricalDistribution]:
    """One categorical distribution per flag over its levels."""
    return {name: CategoricalDistribution([_choice(v) for v in values]) for name, values in space.levels.items()}


def to_settings(params: Mapping[str, Any], space: Space) -> Settings:
    """Settings of a trial's parameters."""
    return Settings({name: _level(params[name], values) for name, values in space.levels.items() if name in params})


def to_params(settings: Settings, space: Space) -> dict[str, Any] | None:
    """Parameters of settings that lie on the grid; ``None`` for settings beside it."""
    if set(settings) != set(space.levels) or any(settings[n] not in v for n, v in space.levels.items()):
        return None
    return {name: _choice(settings[name]) for name in space.levels}


class GridTPESampler(TPESampler):
    """TPE over the whole grid whatever was tried before; falls back to a random untried point.

    Optuna's own search space is the intersection over finished trials, which a baseline (no parameters)
    would empty; and TPE proposes a point again and again once it has converged.
    """

    ATTEMPTS = 20

    def __init__(self, space: Space, taken: Taken, *, seed: int, n_startup_trials: int) -> None:
        super().__init__(seed=seed, n_startup_trials=n_startup_trials)
        self._grid = space
        self._taken = taken
        self._random = random.Random(seed)
        self._distributions = distributions(space)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole grid, always."""
        return dict(self._distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """An allowed point that was not launched yet.

        Raises:
            StopIteration: every allowed point was launched.
        """
        taken = self._taken()
        for _ in range(self.ATTEMPTS):
            params = super().sample_relative(study, trial, search_space)
            if not params:
                break
            settings = to_settings(params, self._grid)
            if settings not in taken and self._grid.forbidden(settings) is None:
                return dict(params)
        free = [settings for settings in self._grid.candidates() if settings not in taken]
        if not free:
            raise StopIteration
        return to_params(self._random.choice(free), self._grid) or {}


def _choice(value: FlagValue) -> bool | int | float | str:
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, dict)) else value


def _level(choice: Any, values: tuple[FlagValue, ...]) -> FlagValue:
    return next(value for value in values if _choice(value) == choice and type(_choice(value)) is type(choice))
