"""Turns one load into its measurement: validity, then stability, then the number and what limits it."""

from __future__ import annotations

import math
from collections import Counter as Count
from collections.abc import Mapping, Sequence

from autotune.measure.bottleneck import bottleneck_in_sight, bottleneck_of
from autotune.measure.facts import Facts, ended_well, facts_of, latency_of
from autotune.measure.rate import Rate
from autotune.measure.stability import truncated_share, violations
from autotune.measure.validity import invalid_reasons
from autotune.measure.window import Start, View, Window
from autotune.records.measurement import Measurement, Outcome
from autotune.records.observation import Capacity, Failure, Observation
from autotune.records.trial import MeasureSpec

WINDOW_FLOOR = 0.015
"""Half-width, as a share of the rate, that no window is better than: 1.5 % is the bias and spread that
short windows of simulated loads keep however quiet they look."""

LENGTH_EFFECT = 0.5
"""Relative error of the rate per relative error of the mean length: lengths from 64 answers (mean known to
11 %) moved simulated rates by 3-10 %. A round figure, until the step model replaces it."""


def judge(
    observation: Observation,
    spec: MeasureSpec,
    capacity: Capacity,
    *,
    forced: bool = False,
    start: Start = "fresh",
    planned: Mapping[str, int] | None = None,
    expected_hit_share: float | None = None,
    earlier: Sequence[Measurement] = (),
) -> Measurement:
    """What one load is worth.

    Args:
        forced: Lengths are forced: no truncation to speak of, and no error of the lengths in the interval.
        start: How the load started; decides when its window may open.
        planned: Tokens asked for by request id, checked where lengths are forced.
        expected_hit_share: Prefix-cache hits that the shared prompt explains, 0..1; ``None``: not checked.
        earlier: Other loads of the same server: lower concurrencies tell bandwidth from compute.
    """
    view = View(observation)
    window = None if view.counter.reset else view.window(spec, start)
    span = _saturated_window(view, spec) if window is None else window
    facts = facts_of(observation, *((0.0, observation.t_s) if span is None else (span.start_s, span.end_s)))
    reasons = invalid_reasons(
        observation,
        None if span is None else facts,
        view.counter,
        planned=planned if forced else None,
        expected_hit_share=expected_hit_share,
    )
    failure = _failure(view)
    outcome = _outcome(view, spec, facts, reasons, failure, window)
    broken = violations(observation, spec, facts, window, forced=forced)
    rate = span.rate if span is not None and outcome in ("steady", "saturated") else None
    paired, wide = _half_widths(view, rate, forced=forced)
    kv_limit = spec.kv_limit
    limit = (
        bottleneck_in_sight(observation, facts, kv_limit=kv_limit)
        if span is None
        else bottleneck_of(observation, facts, capacity, kv_limit=kv_limit, rate=span.rate.per_s, earlier=earlier)
    )
    lengths = [r.output_tokens for r in ended_well(observation) if r.output_tokens is not None]
    return Measurement(
        concurrency=observation.concurrency,
        outcome=outcome,
        valid=not reasons,
        invalid_reasons=reasons,
        stable=outcome in ("steady", "saturated") and all(value <= 0 for value in broken.values()),
        violations=broken,
        output_tokens_per_s=None if rate is None else rate.per_s,
        paired_low=None if rate is None or paired is None else max(0.0, rate.per_s - paired),
        paired_high=None if rate is None or paired is None else rate.per_s + paired,
        low=None if rate is None or wide is None else max(0.0, rate.per_s - wide),
        high=None if rate is None or wide is None else rate.per_s + wide,
        prompt_tokens_per_s=facts.prompt_tokens_per_s,
        kv_usage_mean=facts.kv_mean,
        kv_usage_max=facts.kv_max,
        running_mean=facts.running_mean,
        waiting_mean=facts.waiting_mean,
        preemptions=facts.preemptions,
        finished_requests=len(ended_well(observation)),
        failed_requests=view.failed,
        errors=dict(Count(r.error.kind for r in observation.requests if r.error is not None)),
        truncated_share=None if forced else truncated_share(observation),
        prefix_hit_share=facts.prefix_hit_share,
        mean_output_tokens=sum(lengths) / len(lengths) if lengths else None,
        window_start_s=None if span is None else span.start_s,
        window_s=None if span is None else span.seconds,
        load_s=observation.t_s,
        client=observation.client,
        bottleneck=limit,
        latency=latency_of(observation, facts.start_s, facts.end_s),
        failure=failure,
        notes=_notes(view, span, outcome),
    )


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


def _half_widths(view: View, rate: Rate | None, *, forced: bool) -> tuple[float | None, float | None]:
    """Half of the interval given the lengths, and with their error; tokens/s."""
    if rate is None or rate.half_width is None:
        return None, None
    paired = math.hypot(rate.half_width, WINDOW_FLOOR * rate.per_s)
    lengths = [r.output_tokens for r in ended_well(view.observation) if r.output_tokens is not None]
    if forced:
        return paired, paired
    if len(lengths) < 2:
        return paired, None
    mean = sum(lengths) / len(lengths)
    variance = sum((n - mean) ** 2 for n in lengths) / (len(lengths) - 1)
    error = 1.96 * math.sqrt(variance / len(lengths)) / mean if mean > 0 else 0.0
    return paired, math.hypot(paired, LENGTH_EFFECT * error * rate.per_s)


def _notes(view: View, span: Window | None, outcome: Outcome) -> tuple[str, ...]:
    observation, notes = view.observation, []
    if not any(s.generation_tokens is not None for s in observation.samples):
        notes.append("no server metrics: tokens are counted when answers end, KV use and preemptions are unknown")
    if outcome == "not_settled" and observation.end == "drained":
        notes.append(
            f"the requests ran out after {view.full_until_s:.0f} s, before a steady window: more requests are needed"
        )
    if outcome == "saturated" and span is not None:
        notes.append("saturated: a short window flatters, the rate goes on falling")
    return tuple(notes)
