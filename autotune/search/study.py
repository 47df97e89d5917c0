"""The Optuna study behind a search: ask for settings, tell results, and mend what a killed run left."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune.planning.space import Space
from autotune.records.settings import Settings
from autotune.records.trial import TrialKind, TrialResult
from autotune.search.folder import mend_torn_line
from autotune.search.sampler import GridTPESampler, distributions, to_params, to_settings

RETRIES = 1
"""Settings whose trial said nothing about them (FAIL) are queued again at most so often."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to run next."""

    number: int
    kind: TrialKind
    settings: Settings
    label: str | None
    extra: Mapping[str, Any]
    retry: int
    """How often these settings were started before without a verdict."""


class Study:
    """One study in one journal file; a single process works on it (held by the folder's lock)."""

    def __init__(self, journal: Path, name: str, space: Space, *, seed: int, startup_trials: int = 4) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("optuna").propagate = False
        mend_torn_line(journal)
        journal.with_name(journal.name + ".lock").unlink(missing_ok=True)
        self._space = space
        sampler = GridTPESampler(space, self._taken, seed=seed, n_startup_trials=startup_trials)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name=name,
            direction="minimize",
            sampler=sampler,
            load_if_exists=True,
        )

    def finished(self) -> int:
        """Trials with a verdict: COMPLETE and PRUNED."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))

    def running(self) -> list[int]:
        """Trials that were asked for and never told: left by a run that was killed."""
        return [t.number for t in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]

    def enqueue(
        self,
        settings: Settings,
        kind: TrialKind,
        label: str | None,
        extra: Mapping[str, Any] | None = None,
        retry: int = 0,
    ) -> None:
        """Have these settings run next, wherever they lie in the space."""
        attrs = {
            "kind": kind,
            "label": label,
            "settings": settings.to_data(),
            "extra": dict(extra or {}),
            "retry": retry,
        }
        self._study.enqueue_trial(to_params(settings, self._space) or {}, user_attrs={"autotune": json.dumps(attrs)})

    def queued(self) -> int:
        """Trials that wait to be run."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def ask(self) -> Asked | None:
        """The next queued settings, else what the sampler proposes; ``None`` when nothing is left to try."""
        try:
            trial = self._study.ask(None if self.queued() else dict(distributions(self._space)))
        except StopIteration:
            for number in self.running():
                self._study.tell(number, state=TrialState.FAIL)
            return None
        told = trial.user_attrs.get("autotune")
        if told is None:
            settings = to_settings(trial.params, self._space)
            attrs = {"kind": "search", "label": None, "settings": settings.to_data(), "extra": {}, "retry": 0}
            trial.set_user_attr("autotune", json.dumps(attrs))
            return Asked(number=trial.number, kind="search", settings=settings, label=None, extra={}, retry=0)
        attrs = json.loads(told)
        settings = Settings(attrs["settings"])
        if to_params(settings, self._space) is not None:
            for name, distribution in distributions(self._space).items():
                trial.suggest_categorical(name, distribution.choices)
        return Asked(
            number=trial.number,
            kind=attrs["kind"],
            settings=settings,
            label=attrs["label"],
            extra=attrs["extra"],
            retry=attrs["retry"],
        )

    def tell(self, result: TrialResult, constraints: Mapping[str, float]) -> None:
        """Record a result: value or state, and the same set of constraints on every trial (at most 0 is fine)."""
        frozen = self._frozen(result.number)
        if frozen.state.is_finished():
            return
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        for name, violation in constraints.items():
            trial.set_constraint(name, violation)
        if result.failure is not None:
            trial.set_user_attr("failure", result.failure.kind)
        state = TrialState[result.state]
        value = result.objective if state == TrialState.COMPLETE else None
        self._study.tell(trial, value, state=state)

    def forget(self, number: int) -> bool:
        """Mark a trial without a verdict FAIL and queue its settings again, at most once; True if queued."""
        frozen = self._frozen(number)
        self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        told = frozen.user_attrs.get("autotune")
        if told is None:
            return False
        attrs = json.loads(told)
        if attrs["retry"] >= RETRIES:
            return False
        self.enqueue(Settings(attrs["settings"]), attrs["kind"], attrs["label"], attrs["extra"], attrs["retry"] + 1)
        return True

    def labels(self) -> set[str]:
        """Labels of all trials that ran, run or wait."""
        return {a["label"] for t in self._trials() if (a := _attrs(t)) is not None and a["label"] is not None}

    def _trials(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._trials()[number]

    def _taken(self) -> set[Settings]:
        return {Settings(a["settings"]) for t in self._trials() if (a := _attrs(t)) is not None}


def _attrs(trial: FrozenTrial) -> dict[str, Any] | None:
    told = trial.user_attrs.get("autotune")
    return None if told is None else json.loads(told)
