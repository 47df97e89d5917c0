"""The length probe: real answers to a sample of the questions, to learn how long answers are.

Answers that are cut or still running when the probe ends are censored (Kaplan-Meier), never dropped. All are sent
at once where the cache holds them: then the probe takes as long as its longest answer, and no longer.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.engines.base import Session
from autotune.evaluation.loads import Loads
from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.laws import HLE_LAW, shipped_law
from autotune.physics.simulator import EngineLimits, SimRequest
from autotune.physics.steptime import StepModel
from autotune.records.answer import Answer
from autotune.records.lengths import AnswerLength, Lengths
from autotune.records.observation import Capacity, Failure, Observation, RequestOutcome
from autotune.records.trial import ProbeSpec
from autotune.workloads import Question, Workload
from autotune.workloads.sampling import sample

FEWEST = 64
"""Lengths of fewer answers give the mean to 12 % at best, and the rate to 10 %."""
FEWEST_ENDED = 8
"""Of answers that must have ended in a probe that was stopped early: fewer say nothing about the law."""
PEAK_SHARE = 0.45
"""Of the output limit, cached by an answer on average when a crowd that started together holds most (answers to
hard questions, a third of them cut: 0.44)."""


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """What a probe will send, and what that costs."""

    questions: tuple[Question, ...]
    concurrency: int
    max_tokens: int
    limit_s: float
    seconds: float | None
    """Predicted, if physics knows the server; lengths are a guess."""

    @property
    def text(self) -> str:
        """One sentence for the user, before anything is sent."""
        cost = "" if self.seconds is None else f"about {_minutes(self.seconds)}, "
        return (
            f"probe: real answers to {len(self.questions)} questions, {self.concurrency} at once, to learn how long "
            f"answers are (at most {self.max_tokens:,} tokens each): {cost}no longer than {_minutes(self.limit_s)}"
        )


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found."""

    lengths: Lengths | None
    """``None``: too few answers ended."""
    answers: tuple[Answer, ...]
    observation: Observation
    failure: Failure | None
    text: str
    """One sentence for the user."""


@dataclass(frozen=True)
class ProbeLimit:
    """Stop rule: ends a probe after so many seconds."""

    limit_s: float

    def __call__(self, so_far: Observation) -> str | None:
        """``probe_limit``, or ``None``."""
        return "probe_limit" if so_far.t_s >= self.limit_s else None


def lengths_fingerprint(model: str, workload: Workload) -> str:
    """Sixteen hexadecimal digits: the same model asked the same questions in the same way writes as much."""
    return hashlib.sha256(f"{model}\0{workload.fingerprint}".encode()).hexdigest()[:16]


def plan_probe(loads: Loads, spec: ProbeSpec, capacity: Capacity, *, max_tokens: int, seed: int) -> ProbePlan:
    """Which questions are asked, how many at once, and what it will cost."""
    counts = loads.prompt_tokens
    chosen = sample(loads.admitted, max(FEWEST, spec.questions), seed, lengths=counts)
    known = [] if counts is None else [counts[q.id] for q in chosen if q.id in counts]
    prompt = sum(known) / len(known) if known else 300.0
    slots = len(chosen)
    if capacity.max_num_seqs is not None:
        slots = min(slots, capacity.max_num_seqs * capacity.engines)
    if capacity.kv_tokens is not None:
        slots = min(slots, max(1, int(capacity.kv_tokens / (prompt + PEAK_SHARE * max_tokens))))
    return ProbePlan(
        questions=chosen,
        concurrency=slots,
        max_tokens=max_tokens,
        limit_s=spec.limit_s,
        seconds=_seconds(loads.model, capacity, len(chosen), slots, round(prompt), max_tokens),
    )


def run_probe(loads: Loads, session: Session, plan: ProbePlan, fingerprint: str) -> ProbeResult:
    """Ask, and learn the lengths; what the server does wrong is in the result."""
    requests = loads.requests("probe", questions=plan.questions)
    seen = session.observe(loads.plan(requests, plan.concurrency, keep_text=True), stop=ProbeLimit(plan.limit_s))
    answers = answer_lengths(seen)
    ended = sum(answer.ended for answer in answers)
    enough = ended >= min(FEWEST_ENDED, len(plan.questions))
    lengths = Lengths(
        prompt_tokens=tuple((loads.prompt_tokens or {}).values()),
        answers=tuple(answers),
        max_tokens=plan.max_tokens,
        source="probe",
        fingerprint=fingerprint,
    )
    return ProbeResult(
        lengths=lengths if enough else None,
        answers=tuple(kept_answers(seen.requests, plan.max_tokens, fingerprint)),
        observation=seen,
        failure=seen.failure,
        text=_told(seen, enough=enough),
    )


def answer_lengths(seen: Observation) -> list[AnswerLength]:
    """Length of each answer; those cut or still running are censored, failed requests are left out."""
    lengths = []
    for r in seen.requests:
        if r.error is not None:
            continue
        if r.ended_s is not None and r.output_tokens:
            lengths.append(AnswerLength(tokens=r.output_tokens, ended=r.finish_reason != "length"))
    for tokens in written_so_far(seen):
        lengths.append(AnswerLength(tokens=tokens, ended=False))
    return lengths


def written_so_far(seen: Observation) -> list[int]:
    """Tokens of each answer that still runs, in the order of sending; those that have none are left out.

    Without streaming nobody is told how far one answer is. What the server has written beside the ended answers is
    shared among those that run in proportion to what one stream writes meanwhile (all decode in the same steps).
    """
    running = [r for r in seen.requests if r.ended_s is None]
    read = [(s.t_s, s.generation_tokens, s.running) for s in seen.samples if s.generation_tokens is not None]
    if not running or len(read) < 2:
        return []
    done = sum(r.output_tokens or 0 for r in seen.requests if r.ended_s is not None and r.error is None)
    left = read[-1][1] - read[0][1] - done
    streams = [_stream(read, r.sent_s) for r in running]
    if left <= 0 or sum(streams) <= 0:
        return []
    whole = (int(left * share / sum(streams)) for share in streams)
    return [tokens for tokens in whole if tokens > 0]


def _stream(read: Sequence[tuple[float, int, int | None]], since_s: float) -> float:
    """Tokens that one stream has written since it was sent, by the server's total over those that ran."""
    total = 0.0
    for (before_s, before, _), (t_s, tokens, running) in itertools.pairwise(read):
        inside = (t_s - max(before_s, since_s)) / (t_s - before_s) if t_s > since_s and t_s > before_s else 0.0
        total += inside * (tokens - before) / max(1, running or 1)
    return total


def kept_answers(requests: Sequence[RequestOutcome], max_tokens: int, fingerprint: str) -> list[Answer]:
    """Whole answers, for the run that asks the same questions later."""
    return [
        Answer(
            id=r.id,
            text=r.text,
            finish_reason=r.finish_reason,
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
            max_tokens=max_tokens,
            fingerprint=fingerprint,
        )
        for r in requests
        if r.ended_s is not None and r.error is None and r.text is not None
    ]


def _seconds(
    model: StepModel | None, capacity: Capacity, number: int, at_once: int, prompt: int, max_tokens: int
) -> float | None:
    """What the probe takes if answers are as long as the shipped law says."""
    if model is None or capacity.kv_tokens is None:
        return None
    engines = max(1, capacity.engines)
    law = shipped_law(HLE_LAW, max_tokens)[0]
    middle = [law.quantile((i + 0.5) / number) for i in range(number)]
    # Lengths in an order without a trend: neighbours far apart.
    order = sorted(range(number), key=lambda i: (i * 0.618034) % 1.0)
    requests = [
        SimRequest(id=str(i), prompt_tokens=max(1, prompt), output_tokens=max(1, round(middle[i]))) for i in order
    ]
    kv_tokens = capacity.kv_tokens // engines
    if kv_tokens < prompt + max_tokens + 16:
        return None
    limits = EngineLimits(kv_tokens=kv_tokens, max_num_seqs=max(1, math.ceil(at_once / engines)))
    return run_closed_loop(model, limits, requests, at_once, engines=engines).makespan_s


def _told(seen: Observation, *, enough: bool) -> str:
    whole = [r for r in seen.requests if r.ended_s is not None and r.error is None]
    cut = sum(r.finish_reason == "length" for r in whole)
    running = sum(r.ended_s is None for r in seen.requests)
    failed = len(seen.requests) - len(whole) - running
    found = f"probe of {seen.t_s:.0f} s: {len(whole) - cut} answers ended, {cut} were cut, {running} still ran"
    found += f", {failed} failed" if failed else ""
    return found if enough else f"{found}: too few to know the lengths, loads start fresh"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
