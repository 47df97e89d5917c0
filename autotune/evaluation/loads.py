"""A workload made ready for one server: what fits is counted and admitted, loads are planned from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autotune.engines.base import Session
from autotune.physics.laws import HLE_LAW
from autotune.records.load import LoadPlan, request_limit_s
from autotune.records.trial import EngineSpec, TrialTask, WorkloadSpec
from autotune.workloads import Workload, load
from autotune.workloads.requests import plan_requests
from autotune.workloads.sampling import admit, aside_note
from autotune.workloads.tokens import TokenCounter

REFILL_ROUNDS = 50
"""Requests ready for each one in flight: more answers than any window waits for."""
REFILL_LEAST = 20_000
"""A small model with short answers ends a hundred a second."""
KNOWN_ROUNDS, KNOWN_TOKENS = 10, 30_000_000
"""Where lengths are forced fewer will do: so many answers for each one in flight, or so many tokens, 30,000 a
second for a quarter of an hour. Twenty thousand answers of ten thousand tokens are never written in one load."""
SAMPLES_A_WINDOW = 16
"""Readings of the counters in the shortest window: ten batches of at least one each."""


def asked(engine: EngineSpec, workload: WorkloadSpec) -> WorkloadSpec:
    """What is asked: where nobody answers in earnest (the simulator, dummy weights) and the questions of ``hle`` are
    not given as a file, forced requests of the shipped length law instead; no network, no access needed."""
    in_earnest = engine.kind != "sim" and engine.fixed.get("load_format") != "dummy"
    if in_earnest or workload.name != "hle" or workload.path is not None:
        return workload
    return replace(workload, name="synthetic", law=HLE_LAW, official_prompt=False)


class Loads:
    """The questions of one trial, counted for its model and admitted for its server.

    Attributes:
        available: questions that can be in flight at once.
        forced: whether the answers' lengths are forced.
        set_aside: prompts that do not fit and are not sent.
        notes: what the user should be told.
    """

    def __init__(self, task: TrialTask, session: Session) -> None:
        """Count and admit.

        Raises:
            InputError: no question fits the server's context.
            PrerequisiteError: the data are not to be had from here.
        """
        self._spec = asked(task.engine, task.workload)
        self._trial = task.number
        self._measure = task.measure
        self._workload = load(self._spec)
        self._counts = _count(task, session, self._workload)
        self._admitted, aside = admit(
            self._workload.questions, self._counts, session.capacity.max_model_len, task.workload.max_tokens
        )
        self.set_aside = len(aside)
        self.notes = self._workload.notes
        if aside and self._counts is not None:
            self.notes = (*self.notes, aside_note(aside, self._counts))
        self.available = len(self._admitted)
        self.forced = all(question.forced for question in self._admitted)

    def plan(self, concurrency: int, index: int) -> LoadPlan:
        """The ``index``-th load of the trial, with ``concurrency`` in flight.

        Every load of every trial asks the same questions in the same order; the salt keeps their prefix-cache
        blocks apart, so that a later load is not answered from an earlier one's cache.
        """
        requests = plan_requests(
            self._workload,
            counts=self._counts,
            max_tokens=self._spec.max_tokens,
            seed=self._spec.seed,
            questions=self._admitted,
            number=concurrency + self._refill(concurrency),
            salt=f"trial-{self._trial}-load-{index}",
        )
        return LoadPlan(
            start=requests[:concurrency],
            refill=requests[concurrency:],
            request_limit_s=request_limit_s(self._spec.max_tokens),
            sampling=self._spec.sampling,
            sample_s=min(1.0, self._measure.window_s / SAMPLES_A_WINDOW),
            stall_s=self._measure.stall_s,
            chat_template_kwargs=self._spec.chat_template_kwargs or None,
        )

    def _refill(self, concurrency: int) -> int:
        """Requests to have ready beside those in flight."""
        number = max(REFILL_ROUNDS * concurrency, REFILL_LEAST)
        if not self.forced:
            return number
        mean = sum(q.output_limit(self._spec.max_tokens) for q in self._admitted) / self.available
        return min(number, max(KNOWN_ROUNDS * concurrency, math.ceil(KNOWN_TOKENS / mean)))


def _count(task: TrialTask, session: Session, workload: Workload) -> Mapping[str, int] | None:
    """Prompt tokens by question id; the simulator counts for itself, so that it needs no tokenizer."""
    kwargs = task.workload.chat_template_kwargs
    if task.engine.kind == "sim":
        lengths = {
            q.id: session.count_tokens(q.messages, kwargs) if q.prompt is None else len(q.prompt)
            for q in workload.questions
        }
        return {name: length for name, length in lengths.items() if length is not None}
    counter = TokenCounter(
        task.engine.model,
        chat_template_kwargs=kwargs,
        remote=lambda messages: session.count_tokens(messages, kwargs),
    )
    return counter.count(workload.questions)
