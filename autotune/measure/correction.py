"""The KV correction: from the context that a window happened to hold to the one that a long run holds.

A step reads every cached token, so a window that holds 5 % more than the long run is slower by 5 % of the share
that reading has in a step. The step model says how much; its constants come from the windows of the same server
where there are some, around what physics says of it, or around a plain shape where nothing is known. Real windows
of one H200 that were -4.3..+4.9 % off came out at +0.1..+1.4 %; a wrong model does little harm, for only the
difference between two nearby contexts goes through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measure.facts import Facts
from autotune.measure.rate import Floats, Rate, rate_of
from autotune.measure.stationary import LongRun
from autotune.measure.window import Counter, Window
from autotune.physics.stepfit import StepWindow, fit, steady
from autotune.physics.steptime import CONSTANTS, StepModel, cholesky
from autotune.records.load import Request
from autotune.records.measurement import Constants, KvCorrection
from autotune.records.observation import Capacity, Observation

FACTOR_BOUNDS = (0.8, 1.25)
"""A factor beyond these is no correction any more: the window was not near the steady state."""

SHAPE = {"t0_s": 0.5, "sequence_s": 0.15, "kv_token_s": 0.35}
SHAPE_SD = {"t0_s": 0.7, "sequence_s": 1.0, "kv_token_s": 1.0, "prefill_token_s": 0.5}
"""Shares of a step of which nothing is known, and how wrong they may be (log-normal): the KV cache had 25-60 % of
a step in loads of 32B models on H200s at half to three quarters of the cache, 5-20 % with little in flight."""

FIRST_READING_S = 0.5
"""A first reading of the counters later than this has missed tokens of the load."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The rate that the window would have shown at the long run's context."""

    rate: Rate
    """All engines."""
    record: KvCorrection
    model: StepModel
    """Of one engine, fitted to the windows so far."""
    long_run: LongRun
    """As many as the server truly held at once."""


def correct(
    observation: Observation,
    window: Window,
    counter: Counter,
    facts: Facts,
    capacity: Capacity,
    *,
    long_run: LongRun,
    requests: Mapping[str, Request],
    prior: StepModel | None = None,
    others: Sequence[StepWindow] = (),
) -> Corrected | None:
    """Correct one steady window; ``None`` where the server did not say how much it runs or holds.

    Args:
        counter: Of the load's tokens.
        facts: Of the window.
        long_run: What the loop holds on average.
        requests: All that was planned, by id.
        prior: What is known of one engine before any window; ``None``: nothing.
        others: Windows of other loads of this server, one engine each.
    """
    inside = (counter.times >= window.start_s) & (counter.times <= window.end_s)
    times, tokens = counter.times[inside], counter.tokens[inside]
    batch = facts.running_mean
    held = held_tokens(observation, requests, times, facts, capacity)
    if batch is None or batch <= 0 or held is None or window.rate.per_s <= 0:
        return None
    engines = max(1, capacity.engines)
    seen = StepWindow(
        batch=batch / engines,
        kv_tokens=float(held.mean()) / engines,
        output_tokens_per_s=window.rate.per_s / engines,
        prompt_tokens_per_s=(facts.prompt_tokens_per_s or 0.0) / engines,
        kv_usage=facts.kv_mean,
        weight=window.seconds / 10.0,
    )
    model = step_model(prior, [*steady(others), *steady([seen])], seen, facts.peak_prompt_tokens_per_s)
    expected = _held_at_once(long_run, batch)
    goal = _long_rate(model, expected, engines)
    prompts = _prompt_rates(observation, times, facts.prompt_tokens_per_s or 0.0)
    middle = (held[1:] + held[:-1]) / 2
    factors = np.array(
        [
            goal / max(1e-9, model.rate(seen.batch, kv / engines, p / engines))
            for kv, p in zip(middle, prompts, strict=True)
        ]
    )
    low, high = FACTOR_BOUNDS
    path = np.concatenate([[0.0], np.cumsum(np.diff(tokens) * np.clip(factors, low, high))])
    rate = rate_of(times, path)
    if rate is None:
        return None
    return Corrected(
        rate=rate,
        model=model,
        long_run=expected,
        record=KvCorrection(
            factor=rate.per_s / window.rate.per_s,
            factor_sd=_factor_sd(model, seen, expected, engines),
            window_tokens_per_s=window.rate.per_s,
            window_kv_tokens=float(held.mean()),
            long_run_kv_tokens=expected.kv_tokens,
            constants=_source(model, prior),
        ),
    )


def step_model(
    prior: StepModel | None, windows: Sequence[StepWindow], shape: StepWindow, prompt_tokens_per_s: float | None
) -> StepModel:
    """Constants of one engine from its windows, around a prior, or around the usual shape of a step.

    Args:
        shape: a window that tells how long a step takes.
        prompt_tokens_per_s: what prefill alone can do, if known.
    """
    around = shape_of(shape, prompt_tokens_per_s) if prior is None else prior
    return fit(windows, around) if windows else around


def shape_of(window: StepWindow, prompt_tokens_per_s: float | None) -> StepModel:
    """A step of this window's duration, divided as steps usually are."""
    step_s = window.batch / window.output_tokens_per_s
    prefill_s = 1.0 / prompt_tokens_per_s if prompt_tokens_per_s else 0.0
    return StepModel(
        t0_s=SHAPE["t0_s"] * step_s,
        sequence_s=SHAPE["sequence_s"] * step_s / window.batch,
        kv_token_s=SHAPE["kv_token_s"] * step_s / max(1.0, window.kv_tokens),
        prefill_token_s=min(prefill_s, step_s),
    ).with_sd(**SHAPE_SD)


def held_tokens(
    observation: Observation, requests: Mapping[str, Request], times: Floats, facts: Facts, capacity: Capacity
) -> Floats | None:
    """Cached tokens of all engines at some readings, from what was sent, counted and ended.

    The prompts in flight, and what the server has counted since the beginning less the answers that ended: exact
    to a step, without the cache's blocks, and right for several engines (``kv_usage`` is the fullest one's).
    Where a request failed, or the first reading came late, the KV use of the window stands for all its readings.
    """
    read = [(s.t_s, s.generation_tokens) for s in observation.samples if s.generation_tokens is not None]
    whole = bool(read) and read[0][0] <= FIRST_READING_S and all(r.error is None for r in observation.requests)
    asked = [requests.get(r.id) for r in observation.requests]
    prompts = [
        float(r.prompt_tokens + r.context_tokens) for r in asked if r is not None and r.prompt_tokens is not None
    ]
    if not whole or len(prompts) < len(asked):
        if facts.kv_mean is None or capacity.kv_tokens is None:
            return None
        return np.full(len(times), facts.kv_mean * capacity.kv_tokens)
    counted = np.array(read, dtype=np.float64)
    generated = np.interp(times, counted[:, 0], counted[:, 1]) - counted[0, 1]
    sent = _total_by(times, [r.sent_s for r in observation.requests], prompts)
    ended = [(r.ended_s, p + (r.output_tokens or 0)) for r, p in zip(observation.requests, prompts, strict=True)]
    gone = _total_by(times, [math.inf if t is None else t for t, _ in ended], [n for _, n in ended])
    # Those that wait are the last ones sent, fresh ones: their prompts are not in the cache.
    waiting = (facts.waiting_mean or 0.0) * float(np.mean([r.prompt_tokens or 0 for r in requests.values()]))
    return np.asarray(np.maximum(0.0, sent + generated - gone - waiting), dtype=np.float64)


def _total_by(times: Floats, at: Sequence[float], amounts: Sequence[float]) -> Floats:
    """Sum of the amounts that had come by each time."""
    order = np.argsort(at)
    total = np.concatenate([[0.0], np.cumsum(np.array(amounts)[order])])
    return np.asarray(total[np.searchsorted(np.array(at)[order], times, side="right")], dtype=np.float64)


def _held_at_once(long_run: LongRun, batch: float) -> LongRun:
    """The same loop where the server holds ``batch`` at once: the rest is between answers."""
    return LongRun(
        batch=batch,
        prompt_tokens=long_run.prompt_tokens,
        answer_tokens=long_run.answer_tokens,
        kv_tokens=long_run.kv_tokens * batch / long_run.batch,
    )


def _long_rate(model: StepModel, run: LongRun, engines: int) -> float:
    """Output tokens/s of one engine in the long run."""
    return model.closed_rate(run.batch / engines, run.kv_tokens / engines, run.prompt_tokens, run.answer_tokens)


def _prompt_rates(observation: Observation, times: Floats, mean: float) -> Floats:
    """Prompt tokens/s between neighbouring times; the window's mean where the server does not count them."""
    read = [(s.t_s, s.prompt_tokens) for s in observation.samples if s.prompt_tokens is not None]
    if len(read) < 2:
        return np.full(len(times) - 1, mean)
    counted = np.array(read, dtype=np.float64)
    return np.asarray(np.diff(np.interp(times, counted[:, 0], counted[:, 1])) / np.diff(times), dtype=np.float64)


def _factor_sd(model: StepModel, seen: StepWindow, run: LongRun, engines: int) -> float:
    """Standard deviation of the factor's logarithm from what is not known of the constants."""

    def factor(one: StepModel) -> float:
        window = one.rate(seen.batch, seen.kv_tokens, seen.prompt_tokens_per_s)
        return math.log(max(1e-9, _long_rate(one, run, engines)) / max(1e-9, window))

    base, square = factor(model), 0.0
    lower = cholesky(model.log_covariance)
    for j in range(len(CONSTANTS)):
        shifted = model.scaled(**{name: math.exp(lower[i][j]) for i, name in enumerate(CONSTANTS)})
        square += (factor(shifted) - base) ** 2
    return math.sqrt(square)


def _source(model: StepModel, prior: StepModel | None) -> Constants:
    if "kv_token_s" not in model.guesses:
        return "fitted"
    return "shape" if prior is None else "physics"
