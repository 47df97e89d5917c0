"""Turns one load into its measurement: validity, then stability, then the number and what limits it."""

from __future__ import annotations

import math
from collections import Counter as Count
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.measure import intervals
from autotune.measure.bottleneck import bottleneck_in_sight, bottleneck_of
from autotune.measure.correction import Corrected, correct
from autotune.measure.facts import Facts, ended_well, facts_of, latency_of
from autotune.measure.intervals import Reach
from autotune.measure.rate import Rate
from autotune.measure.stability import truncated_share, violations
from autotune.measure.stationary import StationaryLoad
from autotune.measure.validity import invalid_reasons
from autotune.measure.window import SteadyWindow, View, Window
from autotune.physics.lengths import AnswerLengths
from autotune.physics.steptime import StepModel
from autotune.physics.stepwindows import windows_of
from autotune.records.measurement import Measurement, Outcome
from autotune.records.observation import Capacity, Failure, Observation
from autotune.records.trial import MeasureSpec

LENGTH_EFFECT = 0.5
"""Relative error of the rate per relative error of the mean length, for a load from a fresh start, whose lengths
are known from its own answers alone: lengths from 64 answers moved simulated rates by 3-10 %."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a load that starts in its steady state."""

    load: StationaryLoad
    answers: AnswerLengths
    """Their law made the load."""
    model: StepModel | None = None
    """Step constants of one engine before any window; ``None``: nothing is known of them."""

    @property
    def slots(self) -> int:
        """Requests that the server works on at once."""
        return round(self.load.long_run.batch)

    def rule(self, spec: MeasureSpec) -> SteadyWindow:
        """When such a load may end."""
        return SteadyWindow(spec, start="stationary", slots=self.slots, burst_tokens=self.load.kv_tokens)


def judge(
    observation: Observation,
    spec: MeasureSpec,
    capacity: Capacity,
    *,
    known: Known | None = None,
    planned: Mapping[str, int] | None = None,
    expected_hit_share: float | None = None,
    earlier: Sequence[Measurement] = (),
) -> Measurement:
    """What one load is worth.

    Args:
        known: Of a load that started in its steady state; ``None``: it started fresh.
        planned: Tokens asked for by request id, where the lengths of a fresh start are forced: they are checked,
            nothing is truncated, and the interval has no error of the lengths.
        expected_hit_share: Prefix-cache hits that the shared prompt explains, 0..1; ``None``: not checked.
        earlier: Other loads of the same server: they tell bandwidth from compute, and what a cached token costs.
    """
    load = None if known is None else known.load
    view = View(observation) if known is None else View(observation, known.slots, known.load.kv_tokens)
    window = None if view.counter.reset else view.window(spec, "fresh" if known is None else "stationary")
    span = _saturated_window(view, spec) if window is None else window
    facts = facts_of(observation, *((0.0, observation.t_s) if span is None else (span.start_s, span.end_s)), load)
    reasons = invalid_reasons(
        observation,
        None if span is None else facts,
        view.counter,
        planned=planned if load is None else {r.id: r.max_tokens for r in (*load.start, *load.refill)},
        expected_hit_share=expected_hit_share if load is None else load.hit_share,
    )
    failure = _failure(view)
    outcome = _outcome(view, spec, facts, reasons, failure, window)
    latency = latency_of(observation, facts)
    truncated, mean = _answers(observation, known, forced=planned is not None)
    broken = violations(observation, spec, facts, window, latency, truncated=truncated, answer_tokens=mean)
    rate = span.rate if span is not None and outcome in ("steady", "saturated") else None
    corrected = None
    if known is not None and span is not None and outcome == "steady":
        corrected = _corrected(view, span, facts, capacity, known, earlier)
        rate = rate if corrected is None else corrected.rate
    paired, wide = _reaches(view, rate, corrected, known, capacity, forced=planned is not None)
    kv_limit = spec.kv_limit
    limit = (
        bottleneck_in_sight(observation, facts, kv_limit=kv_limit)
        if span is None
        else bottleneck_of(observation, facts, capacity, kv_limit=kv_limit, rate=span.rate.per_s, earlier=earlier)
    )
    return Measurement(
        concurrency=observation.concurrency,
        outcome=outcome,
        valid=not reasons,
        invalid_reasons=reasons,
        stable=outcome in ("steady", "saturated") and all(value <= 0 for value in broken.values()),
        violations=broken,
        output_tokens_per_s=None if rate is None else rate.per_s,
        paired_low=None if rate is None or paired is None else rate.per_s * paired.low,
        paired_high=None if rate is None or paired is None else rate.per_s * paired.high,
        low=None if rate is None or wide is None else rate.per_s * wide.low,
        high=None if rate is None or wide is None else rate.per_s * wide.high,
        prompt_tokens_per_s=facts.prompt_tokens_per_s,
        kv_usage_mean=facts.kv_mean,
        kv_usage_max=facts.kv_max,
        running_mean=facts.running_mean,
        waiting_mean=facts.waiting_mean,
        preemptions=facts.preemptions,
        finished_requests=len(ended_well(observation)),
        failed_requests=view.failed,
        errors=dict(Count(r.error.kind for r in observation.requests if r.error is not None)),
        truncated_share=truncated,
        prefix_hit_share=facts.prefix_hit_share,
        mean_output_tokens=mean,
        window_start_s=None if span is None else span.start_s,
        window_s=None if span is None else span.seconds,
        load_s=observation.t_s,
        client=observation.client,
        bottleneck=limit,
        latency=latency,
        correction=None if corrected is None else corrected.record,
        failure=failure,
        notes=_notes(view, span, outcome, known, capacity),
    )


def _corrected(
    view: View, span: Window, facts: Facts, capacity: Capacity, known: Known, earlier: Sequence[Measurement]
) -> Corrected | None:
    load = known.load
    return correct(
        view.observation,
        span,
        view.counter,
        facts,
        capacity,
        long_run=load.long_run,
        requests={request.id: request for request in (*load.start, *load.refill)},
        prior=known.model,
        others=windows_of(earlier, capacity),
    )


def _answers(observation: Observation, known: Known | None, *, forced: bool) -> tuple[float | None, float | None]:
    """Share of the answers that the limit cuts, and their mean: by the law that made the load, else as seen."""
    if known is not None:
        return known.answers.law.cut_share, known.load.long_run.answer_tokens
    lengths = [r.output_tokens for r in ended_well(observation) if r.output_tokens is not None]
    return None if forced else truncated_share(observation), sum(lengths) / len(lengths) if lengths else None


def _saturated_window(view: View, spec: MeasureSpec) -> Window | None:
    """A rate for a load that is saturated rather than settled, if it was still fully loaded."""
    span = None if view.counter.reset else view.saturated_span(spec)
    rate = view.counter.rate(*span) if span is not None else None
    if span is None or rate is None or span[1] > view.full_until_s:
        return None
    return Window(start_s=span[0], end_s=span[1], rate=rate, source=view.counter.source)


def _failure(view: View) -> Failure | None:
    """The failure of the observation, or the one that its requests add up to."""
    observation = view.observation
    if observation.failure is not None:
        return observation.failure
    failed = [r.error for r in observation.requests if r.error is not None]
    if observation.end != "stopped:failing" and len(failed) <= len(view.ended) - len(failed):
        return None
    if not failed:
        return None
    last = failed[-1]
    return Failure(
        kind="unknown",
        line=f"{len(failed)} of {len(view.ended)} requests failed, the last one: {last.kind}: {last.message}",
    )


def _outcome(
    view: View,
    spec: MeasureSpec,
    facts: Facts,
    reasons: tuple[str, ...],
    failure: Failure | None,
    window: Window | None,
) -> Outcome:
    end = view.observation.end
    if end in ("engine_died", "stalled") or (failure is not None and end != "stopped:client_error"):
        return "failed"
    if reasons:
        return "invalid"
    if window is None:
        return "saturated" if view.ever_saturated(spec) else "not_settled"
    full = facts.kv_max is not None and facts.kv_max > spec.kv_limit
    return "saturated" if full or facts.preemptions else "steady"


def _reaches(
    view: View, rate: Rate | None, corrected: Corrected | None, known: Known | None, capacity: Capacity, *, forced: bool
) -> tuple[Reach | None, Reach | None]:
    """Of the interval given the lengths, and of that with their error."""
    if rate is None:
        return None, None
    paired = intervals.given_the_lengths(rate, 0.0 if corrected is None else corrected.record.factor_sd)
    if paired is None or forced:
        return paired, paired
    if known is not None:
        if corrected is None:
            return paired, None
        engines = max(1, capacity.engines)
        return paired, paired.and_also(
            intervals.of_the_lengths(corrected.model, corrected.long_run, engines, known.answers)
        )
    lengths = [r.output_tokens for r in ended_well(view.observation) if r.output_tokens is not None]
    if len(lengths) < 2:
        return paired, None
    mean = sum(lengths) / len(lengths)
    variance = sum((n - mean) ** 2 for n in lengths) / (len(lengths) - 1)
    error = LENGTH_EFFECT * intervals.Z * math.sqrt(variance / len(lengths)) / mean if mean > 0 else 0.0
    return paired, paired.and_also(Reach(low=math.exp(-error), high=math.exp(error)))


def _notes(
    view: View, span: Window | None, outcome: Outcome, known: Known | None, capacity: Capacity
) -> tuple[str, ...]:
    observation, notes = view.observation, []
    if not any(s.generation_tokens is not None for s in observation.samples):
        notes.append("no server metrics: tokens are counted when answers end, KV use and preemptions are unknown")
    if outcome == "not_settled" and observation.end == "drained":
        notes.append(
            f"the requests ran out after {view.full_until_s:.0f} s, before a steady window: more requests are needed"
        )
    if outcome == "saturated" and span is not None:
        notes.append("saturated: a short window flatters, the rate goes on falling")
    if known is not None and known.load.saturates(capacity.kv_tokens):
        kv, held = max(known.load.kv_tokens, known.load.long_run.kv_tokens), capacity.kv_tokens or 0
        notes.append(f"more in flight than the cache holds was foreseen: {kv:,.0f} KV tokens of {held:,}")
    return tuple(notes)
