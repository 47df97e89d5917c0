"""A workload made ready for one server: what fits is counted and admitted, loads are planned from it."""

from __future__ import annotations

from autotune.engines.base import Session
from autotune.records.load import LoadPlan, request_limit_s
from autotune.records.trial import TrialTask
from autotune.workloads import load
from autotune.workloads.requests import plan_requests
from autotune.workloads.sampling import admit, aside_note
from autotune.workloads.tokens import TokenCounter

REFILL_ROUNDS = 50
"""Requests ready for each one in flight: more answers than any window waits for."""
REFILL_LEAST = 2000


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
        self._spec = task.workload
        self._trial = task.number
        self._workload = load(task.workload)
        counter = TokenCounter(
            task.engine.model,
            chat_template_kwargs=task.workload.chat_template_kwargs,
            remote=lambda messages: session.count_tokens(messages, task.workload.chat_template_kwargs),
        )
        self._counts = counter.count(self._workload.questions)
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
            number=concurrency + max(REFILL_ROUNDS * concurrency, REFILL_LEAST),
            salt=f"trial-{self._trial}-load-{index}",
        )
        return LoadPlan(
            start=requests[:concurrency],
            refill=requests[concurrency:],
            request_limit_s=request_limit_s(self._spec.max_tokens),
            sampling=self._spec.sampling,
            chat_template_kwargs=self._spec.chat_template_kwargs or None,
        )
