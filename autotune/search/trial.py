"""One trial, from record to record: start a server, climb the load, judge it, stop the server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from autotune.engines import engine_for
from autotune.errors import LaunchFailed
from autotune.evaluation.loads import asked
from autotune.evaluation.probe import ProbeResult
from autotune.planning import random_weights
from autotune.records.event import Emit, Event, nowhere
from autotune.records.measurement import Measurement
from autotune.records.observation import Capacity, Failure, FailureKind
from autotune.records.trial import TrialResult, TrialState, TrialTask
from autotune.search.climb import best_load
from autotune.search.serverlife import ServerLife
from autotune.workloads import load

ENVIRONMENT_FAILURES: frozenset[FailureKind] = frozenset({"gpu_busy", "port_in_use", "disk_full", "interrupted"})
"""Failures that say nothing about the settings."""


def run_trial(task: TrialTask, *, emit: Emit = nowhere) -> TrialResult:
    """Run one trial.

    A server that does not start and a load that fails are results. Only what stops every trial (no vLLM, an
    unreadable workload, a full disk) is raised.

    Raises:
        PrerequisiteError: nothing can be started here.
        InputError: the workload cannot be read, nothing of it fits, or a flag means nothing with random weights.
    """
    random_weights.check(task.engine.fixed, [*task.engine.fixed, *task.settings])
    load(asked(task.engine, task.workload))  # what is wrong with it is said before a server starts
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    tell = _tag(emit, task)
    engine = engine_for(task.engine, folder=None if task.folder is None else Path(task.folder), emit=tell)
    began = engine.now()
    life: ServerLife | None = None
    startup_s: float | None = None
    capacity: Capacity | None = None
    failure: Failure | None = None
    argv: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    resolved = None
    try:
        with engine.session(task.settings) as session:
            startup_s, capacity, argv = session.startup_s, session.capacity, session.argv
            versions, resolved = dict(session.versions), session.resolved
            life = ServerLife(task, session, engine.now, began, tell)
            life.run()
    except LaunchFailed as error:
        startup_s, failure = error.seconds, error.failure
    loads = [] if life is None else life.loads
    probed = None if life is None else life.probed
    if failure is None:
        failures = [None if probed is None else probed.failure, *(load.failure for load in loads)]
        failure = next((f for f in reversed(failures) if f is not None), None)
    best = best_load(loads)
    return TrialResult(
        number=task.number,
        kind=task.kind,
        state=_state(task, loads, best, failure, probed),
        settings=task.settings,
        loads=tuple(loads),
        best=best,
        startup_s=startup_s,
        total_s=engine.now() - began,
        capacity=capacity,
        failure=failure,
        argv=argv,
        versions=versions,
        label=task.label,
        started_at=started_at,
        requests_set_aside=0 if life is None else life.questions.set_aside,
        resolved=resolved,
        lengths=None if probed is None else probed.lengths,
        step_s=None if life is None else life.step_s,
        notes=_notes(task),
    )


def _state(
    task: TrialTask,
    loads: list[Measurement],
    best: int | None,
    failure: Failure | None,
    probed: ProbeResult | None,
) -> TrialState:
    if best is not None or (task.kind == "probe" and probed is not None and probed.lengths is not None):
        return "COMPLETE"
    if failure is not None:
        return "FAIL" if failure.kind in ENVIRONMENT_FAILURES else "PRUNED"
    judged = [load for load in loads if load.outcome in ("steady", "saturated", "failed")]
    return "PRUNED" if judged else "FAIL"


def _notes(task: TrialTask) -> tuple[str, ...]:
    return (random_weights.NOTE,) if random_weights.random_weights(task.engine.fixed) else ()


def _tag(emit: Emit, task: TrialTask) -> Emit:
    return lambda event: emit(Event(kind=event.kind, trial=task.number, data=event.data))
