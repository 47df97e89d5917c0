"""Runs trials in this process, one after the other."""

from __future__ import annotations

from autotune.records.event import Emit
from autotune.records.trial import TrialResult, TrialTask
from autotune.search.trial import run_trial


class Local:
    """The executor of one machine."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def __call__(self, task: TrialTask) -> TrialResult:
        """Run one trial here."""
        return run_trial(task, emit=self._emit)
