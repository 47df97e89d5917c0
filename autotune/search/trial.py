"""One trial, from record to record: start a server, climb the load, judge it, stop the server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from autotune.engines import engine_for
from autotune.engines.base import Session
from autotune.errors import LaunchFailed
from autotune.evaluation.loads import Loads
from autotune.measure.judge import judge
from autotune.measure.window import SteadyWindow
from autotune.records.codec import dumps
from autotune.records.event import Emit, Event, nowhere
from autotune.records.measurement import Measurement
from autotune.records.observation import Capacity, Failure, FailureKind, Observation
from autotune.records.trial import TrialResult, TrialState, TrialTask
from autotune.search.climb import best_load, next_concurrency
from autotune.search.folder import write_whole

ENVIRONMENT_FAILURES: frozenset[FailureKind] = frozenset({"gpu_busy", "port_in_use", "disk_full", "interrupted"})
"""Failures that say nothing about the settings."""


def run_trial(task: TrialTask, *, emit: Emit = nowhere) -> TrialResult:
    """Run one trial.

    A server that does not start and a load that fails are results. Only what stops every trial (no vLLM, an
    unreadable workload, a full disk) is raised.

    Raises:
        PrerequisiteError: nothing can be started here.
        InputError: the workload cannot be read, or nothing of it fits.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    engine = engine_for(task.engine, folder=None if task.folder is None else Path(task.folder), emit=_tag(emit, task))
    began = engine.now()
    loads: list[Measurement] = []
    startup_s: float | None = None
    capacity: Capacity | None = None
    failure: Failure | None = None
    argv: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    resolved = None
    set_aside = 0
    try:
        with engine.session(task.settings) as session:
            startup_s, capacity, argv = session.startup_s, session.capacity, session.argv
            versions, resolved = dict(session.versions), session.resolved
            questions = Loads(task, session)
            set_aside = questions.set_aside
            for note in questions.notes:
                _tag(emit, task)(Event(kind="note", data={"text": note}))
            loads = _climb(task, session, questions, began, engine.now, _tag(emit, task))
            failure = next((load.failure for load in reversed(loads) if load.failure is not None), None)
    except LaunchFailed as error:
        startup_s, failure = error.seconds, error.failure
    best = best_load(loads)
    return TrialResult(
        number=task.number,
        kind=task.kind,
        state=_state(loads, best, failure),
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
        requests_set_aside=set_aside,
        resolved=resolved,
    )


def _climb(
    task: TrialTask, session: Session, questions: Loads, began: float, now: Callable[[], float], emit: Emit
) -> list[Measurement]:
    loads: list[Measurement] = []
    while True:
        concurrency = next_concurrency(task.concurrency, loads, questions.available)
        if concurrency is None:
            return loads
        if task.trial_limit_s is not None and now() - began > task.trial_limit_s:
            emit(Event(kind="note", data={"text": f"trial limit of {task.trial_limit_s:.0f} s reached"}))
            return loads
        emit(Event(kind="load_started", data={"concurrency": concurrency}))
        plan = questions.plan(concurrency, len(loads))
        window = SteadyWindow(task.measure)
        observation = session.observe(plan, stop=window)
        measurement = judge(
            observation,
            task.measure,
            session.capacity,
            forced=questions.forced,
            planned={request.id: request.max_tokens for request in (*plan.start, *plan.refill)},
            earlier=loads,
        )
        _keep(task, len(loads), observation)
        loads.append(measurement)
        emit(
            Event(
                kind="load_ended",
                data={
                    "concurrency": concurrency,
                    "outcome": measurement.outcome,
                    "output_tokens_per_s": measurement.output_tokens_per_s,
                    "kv_usage": measurement.kv_usage_mean,
                    "stable": measurement.stable,
                    "reasons": "; ".join(measurement.invalid_reasons),
                },
            )
        )


def _state(loads: list[Measurement], best: int | None, failure: Failure | None) -> TrialState:
    if best is not None:
        return "COMPLETE"
    if failure is not None:
        return "FAIL" if failure.kind in ENVIRONMENT_FAILURES else "PRUNED"
    judged = [load for load in loads if load.outcome in ("steady", "saturated", "failed")]
    return "PRUNED" if judged else "FAIL"


def _keep(task: TrialTask, index: int, observation: Observation) -> None:
    if task.folder is not None:
        name = f"observation-{index:02d}-{observation.concurrency}.json"
        write_whole(Path(task.folder) / name, dumps(observation) + "\n")


def _tag(emit: Emit, task: TrialTask) -> Emit:
    return lambda event: emit(Event(kind=event.kind, trial=task.number, data=event.data))
