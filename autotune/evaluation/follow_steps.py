"""Speed and capacity of the server of a run under way: step constants fitted around what any server is like."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_draws import LawDraws
from autotune.evaluation.follow_replay import FULL_KV, Flight, queued_beside_room, replay
from autotune.evaluation.follow_series import RunSeries
from autotune.physics.fluid import RECOMPUTED
from autotune.physics.simulator import EngineLimits
from autotune.physics.stepdraws import posterior_draws
from autotune.physics.stepfit import NOISE_PRIOR, StepWindow, fit
from autotune.physics.steptime import CONSTANTS, StepModel

Array = npt.NDArray[np.float64]

KV_FULL = 0.99
"""KV use that counts as full."""
USABLE = (0.01, 0.97)
"""KV use between which the capacity can be read off."""
T0_S, SEQUENCE_S, PREFILL_TOKEN_S, BEYOND_S = 14e-3, 20e-6, 25e-6, 50e-6
CACHE_S, KV_TOKEN_S = 25e-3, 3e-8
"""Reading a whole cache once; per token where its size is not known."""
SERVER_SD = {"t0_s": 0.42, "sequence_s": 0.65, "kv_token_s": 0.6, "prefill_token_s": 1.0, "beyond_s": 0.8}
SERVER_CORRELATION = {
    ("t0_s", "kv_token_s"): -0.55,
    ("t0_s", "sequence_s"): 0.45,
    ("t0_s", "prefill_token_s"): 0.6,
    ("sequence_s", "kv_token_s"): -0.25,
    ("sequence_s", "prefill_token_s"): 0.5,
}
"""How servers differ: physical start values of 23 shipped models on six cards with TP 1-8 where they fit. What
weights leave free is cache: t0 and the reading of the cache go against each other, their sum is 42 ms +- 24 %."""
LINE_SD, LINES = 0.05, 6.0
"""Error of the model against one line of a real run (H100 x 8, batches of 100-1,000: 4.8 % rms), and how many lines
a run is worth at most: neighbours share their errors."""
HIT_SHARE = (0.0, 0.6)
"""Range of the share of a preempted sequence that the prefix cache still holds (one run: 0.4)."""


def kv_capacity(series: RunSeries, flight: Flight, draws: LawDraws, max_tokens: int) -> float | None:
    """Tokens over all engines: as logged, else from the KV use and what those in flight have written."""
    if series.kv_capacity_tokens:
        return float(series.kv_capacity_tokens)
    rng = np.random.default_rng(1)
    found = []
    for number in range(min(8, len(draws.chosen))):
        _, _, sums = replay(draws.flights[number], draws.chance(number), max_tokens, rng)
        estimate = _capacity(flight, sums)
        if estimate:
            found.append(estimate)
    return float(np.median(found)) if found else None


def _capacity(flight: Flight, written: Array) -> float | None:
    """Capacity from written tokens and KV use: usage = (prompts + written) / capacity, least squares."""
    usage = np.array([np.nan if r.kv_usage is None else r.kv_usage for r in flight.readings])
    running = np.array([r.running for r in flight.readings])
    usable = np.isfinite(usage) & (usage > USABLE[0]) & (usage < USABLE[1]) & (running > 0)
    index = np.nonzero(usable)[0]
    if len(index) == 0:
        return None
    if flight.prompt_tokens is not None or len(index) < 4:
        held = running * (flight.prompt_tokens if flight.prompt_tokens is not None else 300.0) + written
        return float(np.median(held[index] / usage[index]))
    from scipy.optimize import nnls

    design = np.stack([running[index], written[index]], axis=1) / usage[index][:, None]
    _, per_token = nnls(design, np.ones(len(index)))[0]
    return float(1.0 / per_token) if per_token > 0 else None


def step_draws(
    series: RunSeries,
    flight: Flight,
    written: Array,
    capacity: float | None,
    prompt_tokens: float,
    count: int,
    rng: np.random.Generator,
) -> list[tuple[StepModel, float]]:
    """Equally likely constants of one engine, given the readings, each with its ``recompute_factor``.

    Args:
        written: tokens written by those that run, at the end of each interval.
        prompt_tokens: mean.
    """
    engines = series.engines
    start = StepModel(
        t0_s=T0_S,
        sequence_s=SEQUENCE_S,
        kv_token_s=CACHE_S / (capacity / engines) if capacity else KV_TOKEN_S,
        prefill_token_s=PREFILL_TOKEN_S,
        beyond_s=BEYOND_S,
        log_covariance=_server_covariance(),
    )
    rows, slowed = map(_weighed, _windows(series, flight, written, capacity, prompt_tokens))
    fitted = fit(rows, start, slowed=slowed) if rows or slowed else start
    drawn = posterior_draws(start, fitted, rows, slowed, count, rng)
    if capacity is None:
        return [(model, 1.0) for model, _ in drawn]
    # The simulator computes preempted sequences again; what that costs a token is set so that its steps are as
    # much slower with a full cache as was seen, or as is usual.
    ran = sum(r.running for r in flight.readings)
    held = capacity / engines
    batch = held / (prompt_tokens + max(1.0, float(written.sum()) / max(1.0, ran)))
    if slowed:
        batch = statistics.fmean(w.batch for w in slowed)
    again = RECOMPUTED * (1 - sum(HIT_SHARE) / 2) * batch
    return [(m, (slow - 1.0) * m.step_s(batch, held) / (again * m.prefill_token_s)) for m, slow in drawn]


def _windows(
    series: RunSeries, flight: Flight, written: Array, capacity: float | None, prompt_tokens: float
) -> tuple[list[StepWindow], list[StepWindow]]:
    """The intervals of one engine, those with a full cache apart."""
    engines, readings = series.engines, flight.readings
    usage = np.array([np.nan if r.kv_usage is None or not capacity else r.kv_usage * capacity for r in readings])
    rows: list[StepWindow] = []
    slowed: list[StepWindow] = []
    for i in range(1, len(readings)):
        before, now = readings[i - 1], readings[i]
        batch = (before.running + now.running) / 2 / engines
        if batch < 0.5 or now.output_tokens <= 0 or now.running == 0:
            continue
        held = [
            u if np.isfinite(u) else w + r.running * prompt_tokens
            for u, w, r in ((usage[j], written[j], readings[j]) for j in (i - 1, i))
        ]
        full = max(before.kv_highest or 0.0, now.kv_highest or 0.0) >= FULL_KV
        (slowed if full else rows).append(
            StepWindow(
                batch=batch,
                kv_tokens=sum(held) / 2 / engines,
                output_tokens_per_s=now.output_tokens / now.span_s / engines,
                prompt_tokens_per_s=(now.prompt_tokens or 0.0) / now.span_s / engines,
            )
        )
    return rows, slowed


def _server_covariance() -> tuple[tuple[float, ...], ...]:
    def entry(a: str, b: str) -> float:
        known = SERVER_CORRELATION.get((a, b), SERVER_CORRELATION.get((b, a), 0.0))
        return SERVER_SD[a] * SERVER_SD[b] * (1.0 if a == b else known)

    return tuple(tuple(entry(a, b) for b in CONSTANTS) for a in CONSTANTS)


def _weighed(rows: list[StepWindow]) -> list[StepWindow]:
    weight = min(1.0, LINES / max(1, len(rows))) * (NOISE_PRIOR / LINE_SD) ** 2
    return [dataclasses.replace(row, weight=weight) for row in rows]


def run_limits(
    series: RunSeries, flight: Flight, capacity: float | None, max_tokens: int, prompt_tokens: float
) -> EngineLimits:
    """Limits of one engine as far as they show."""
    engines = series.engines
    most = max(r.running for r in flight.readings) / engines
    seqs = max(1024, round(most) + 1)
    if len(queued_beside_room(flight.readings)) >= 2:
        seqs = max(1, round(most))
    least = 2 * (max_tokens + prompt_tokens) + 32
    return EngineLimits(
        kv_tokens=round(max(least, capacity / engines if capacity else 1e12)),
        max_num_seqs=seqs,
        max_num_batched_tokens=max(8192, seqs),
    )
