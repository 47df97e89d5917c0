"""What is done inside one server life: the length probe where it is needed, then loads, climbed and judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.engines.base import Session
from autotune.evaluation.loads import Load, Loads
from autotune.evaluation.probe import ProbeResult, lengths_fingerprint, plan_probe, run_probe
from autotune.measure.correction import step_model
from autotune.measure.judge import Known, judge
from autotune.measure.window import SteadyWindow
from autotune.physics.stepfit import residuals
from autotune.physics.steptime import CONSTANTS
from autotune.physics.stepwindows import windows_of
from autotune.records.answer import Answer
from autotune.records.codec import dumps
from autotune.records.event import Emit, Event
from autotune.records.measurement import Measurement
from autotune.records.observation import Observation
from autotune.records.trial import TrialTask
from autotune.search.climb import next_concurrency
from autotune.search.folder import append_line, read_lines, write_whole

FEWEST_ROWS = 3
"""Loads that step constants are read from: one concurrency tells nothing of another."""


@dataclass(frozen=True)
class _Seen:
    """One load that was run, without the text that was sent."""

    observation: Observation
    known: Known | None
    planned: dict[str, int] | None


class ServerLife:
    """The work of one trial on one running server.

    Attributes:
        loads: measurements in order.
        probed: what the probe found; ``None``: there was none.
    """

    def __init__(self, task: TrialTask, session: Session, now: Callable[[], float], began: float, emit: Emit) -> None:
        """Make the questions ready.

        Raises:
            InputError: no question fits the server's context.
            PrerequisiteError: the data are not to be had from here.
        """
        self._task, self._session, self._now, self._began, self._emit = task, session, now, began, emit
        self.questions = Loads(task, session)
        self.loads: list[Measurement] = []
        self.probed: ProbeResult | None = None
        self._seen: list[_Seen] = []
        for note in self.questions.notes:
            self._note(note)
        self._fingerprint = lengths_fingerprint(task.engine.model, self.questions.workload)
        self.questions.remember(self._written())

    def run(self) -> None:
        """Probe if lengths are to be found out, then climb."""
        if self._task.probe is not None and self.questions.answers is None:
            self._probe()
        if self._task.kind == "probe" or (self.probed is not None and self.probed.failure is not None):
            return
        self._climb()
        self._judge_again()

    @property
    def step_s(self) -> dict[str, float] | None:
        """Step constants of one engine, fitted to all loads, and the relative error they leave."""
        windows = windows_of(self.loads, self._session.capacity)
        if len(windows) < FEWEST_ROWS:
            return None
        largest = max(windows, key=lambda window: window.batch)
        model = step_model(self.questions.model, windows, largest, None)
        errors = residuals(model, windows)
        rms = math.sqrt(sum(error * error for error in errors) / len(errors))
        return {**{name: getattr(model, name) for name in CONSTANTS}, "rms": rms}

    def _probe(self) -> None:
        task, capacity = self._task, self._session.capacity
        if task.probe is None:
            return
        plan = plan_probe(
            self.questions, task.probe, capacity, max_tokens=task.workload.max_tokens, seed=task.workload.seed
        )
        self._note(plan.text)
        found = run_probe(self.questions, self._session, plan, self._fingerprint)
        self._note(found.text)
        self.probed = found
        if self._answers is not None:
            for answer in found.answers:
                append_line(self._answers, dumps(answer))
        self.questions.remember({answer.id: answer.text for answer in found.answers})
        if found.lengths is not None:
            self.questions.learn(found.lengths)

    @property
    def _answers(self) -> Path | None:
        return None if self._task.answers is None else Path(self._task.answers) / "probe.jsonl"

    def _written(self) -> dict[str, str]:
        """Answers that an earlier probe of the same model and questions kept."""
        if self._answers is None:
            return {}
        kept = read_lines(self._answers, Answer)
        return {answer.id: answer.text for answer in kept if answer.fingerprint == self._fingerprint}

    def _climb(self) -> None:
        task = self._task
        while True:
            concurrency = next_concurrency(task.concurrency, self.loads, self.questions.available)
            if concurrency is None:
                return
            if task.trial_limit_s is not None and self._now() - self._began > task.trial_limit_s:
                self._note(f"trial limit of {task.trial_limit_s:.0f} s reached")
                return
            self._emit(Event(kind="load_started", data={"concurrency": concurrency}))
            self._measure(self.questions.load(concurrency, len(self.loads)))

    def _measure(self, load: Load) -> None:
        window = SteadyWindow(self._task.measure)
        if load.known is not None:
            window = load.known.rule(self._task.measure)
        observation = self._session.observe(load.plan, stop=window)
        self._keep(observation)
        sent = {outcome.id for outcome in observation.requests}
        known = None if load.known is None else replace(load.known, load=load.known.load.sent(sent))
        planned = None if load.known is not None or load.planned is None else dict(load.planned)
        seen = _Seen(observation, known, planned)
        measurement = self._judged(seen, self.loads)
        self._seen.append(seen)
        self.loads.append(measurement)
        self._emit(
            Event(
                kind="load_ended",
                data={
                    "concurrency": observation.concurrency,
                    "outcome": measurement.outcome,
                    "output_tokens_per_s": measurement.output_tokens_per_s,
                    "kv_usage": measurement.kv_usage_mean,
                    "stable": measurement.stable,
                    "reasons": "; ".join(measurement.invalid_reasons),
                },
            )
        )

    def _judged(self, seen: _Seen, others: list[Measurement]) -> Measurement:
        return judge(
            seen.observation,
            self._task.measure,
            self._session.capacity,
            known=seen.known,
            planned=seen.planned,
            earlier=others,
        )

    def _judge_again(self) -> None:
        """Each load with what all the others tell of the steps; the first ones were judged knowing less."""
        before = list(self.loads)
        self.loads = [
            self._judged(seen, [*before[:i], *before[i + 1 :]]) if seen.known is not None else before[i]
            for i, seen in enumerate(self._seen)
        ]

    def _keep(self, observation: Observation) -> None:
        if self._task.folder is not None:
            name = f"observation-{len(self.loads):02d}-{observation.concurrency}.json"
            write_whole(Path(self._task.folder) / name, dumps(observation) + "\n")

    def _note(self, text: str) -> None:
        self._emit(Event(kind="note", data={"text": text}))
