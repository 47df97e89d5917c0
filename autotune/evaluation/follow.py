"""How long a run under way will take, from what its server says: no lengths and no model need be known.

From running, waiting and tokens follows how far each sequence in flight is (``follow_replay``), from the ends
which lengths the answers have (``follow_law``), from the rates how fast a step is (``physics/stepfit``). Each
is a posterior around a broad prior; draws of all of them are simulated to the end, and the spread of the ends
is the interval.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from autotune.errors import InputError
from autotune.evaluation.follow_completions import forecast_completions
from autotune.evaluation.follow_draws import LawDraws, draw_laws
from autotune.evaluation.follow_input import read_series
from autotune.evaluation.follow_loop import USUAL_PROMPT
from autotune.evaluation.follow_replay import Flight, Population, read_flight, replay
from autotune.evaluation.follow_series import RunSeries, RunStretch, run_stretch
from autotune.evaluation.follow_steps import HIT_SHARE, KV_FULL, kv_capacity, run_limits, step_draws
from autotune.evaluation.follow_tables import Completions
from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.forecast import COPY_FLIGHT, LEVEL, copied
from autotune.physics.lengths import AnswerLengths
from autotune.physics.simulator import EngineLimits, SimRequest
from autotune.physics.steptime import StepModel

DRAWS = 48
MODEL_SD = 0.06
"""Relative error of the remaining time that the method itself adds (set on simulated runs)."""
SIDE_SHARE, SIDE_QUANTILE, REACH = 0.05, 1.645, 2.0
"""The outer draws that set the spread of a side, their place in a normal law, and how many spreads make 95 %."""
COPY_ABOVE = 300
"""More requests than this are simulated by a smaller copy of the run."""
SAMPLE_S, SAMPLES = 5.0, 1000
"""A simulated run is looked at every so many seconds; a long one about so many times (a look costs time)."""
FINISHED_ENOUGH = 0.85
"""With nothing in flight and fewer ends seen than this share of the requests, the run is not over but broken off."""


@dataclass(frozen=True, kw_only=True)
class FollowForecast:
    """Forecast of a run under way; times in seconds from the first send."""

    SCHEMA: ClassVar[str] = "autotune/follow/1"

    elapsed_s: float
    forecast_s: float
    """Total, first send to last end."""
    remaining_s: float
    low_s: float
    """Of the total."""
    high_s: float
    level: float
    done: bool
    length_source: str
    """``observed+prior``, ``completions``, or the file that gave the lengths."""
    kv_full_at_s: float | None
    """When the KV cache was or will be full; ``None``: never, or not known."""
    limits: tuple[str, ...]
    """What the forecast does not know, in words."""


def follow_files(
    paths: Sequence[Path],
    *,
    requests: int,
    max_tokens: int,
    at_s: float | None = None,
    lengths: AnswerLengths | None = None,
) -> FollowForecast:
    """Forecast from a log, saved pages or a CSV; see ``follow``."""
    series = read_series(paths)
    if isinstance(series, Completions):
        return follow_completions(series, requests=requests, at_s=at_s)
    return follow(series, requests=requests, max_tokens=max_tokens, at_s=at_s, lengths=lengths)


def follow_completions(series: Completions, *, requests: int, at_s: float | None = None) -> FollowForecast:
    """Forecast from ends alone: a wide interval.

    Raises:
        InputError: nothing has ended by then, or more than there are requests.
    """
    found = forecast_completions(series.times_s, series.counts, requests=requests, at_s=at_s)
    return FollowForecast(
        elapsed_s=round(found.elapsed_s, 1),
        forecast_s=round(found.forecast_s, 1),
        remaining_s=round(found.forecast_s - found.elapsed_s, 1),
        low_s=round(found.low_s, 1),
        high_s=round(found.high_s, 1),
        level=LEVEL,
        done=found.done,
        length_source="completions",
        kv_full_at_s=None,
        limits=found.limits,
    )


def follow(
    series: RunSeries,
    *,
    requests: int,
    max_tokens: int,
    at_s: float | None = None,
    lengths: AnswerLengths | None = None,
    seed: int = 0,
) -> FollowForecast:
    """Forecast from what the server said so far.

    Args:
        requests: of the whole run.
        max_tokens: output limit of each.
        at_s: look at the first seconds only, as if it were then.
        lengths: of the answers, where they are known better than from this run.

    Raises:
        InputError: no load in the source, or more in flight than there are requests.
    """
    stretch = run_stretch(series, at_s)
    if stretch is None:
        raise InputError("the source shows no load" if at_s is None else f"no load in the first {at_s:g} s")
    flight = read_flight(stretch.readings, requests)
    peak = max(r.in_flight for r in stretch.readings)
    if peak > requests * 1.02 + 2:
        raise InputError(
            f"{peak:.0f} requests were in flight at once, more than the {requests} of the run",
            hint="give all requests of the run with --requests",
        )
    finished = flight.finished
    broken_off = not flight.at_once and finished is not None and finished < FINISHED_ENOUGH * requests
    full_at = next((r.t_s for r in stretch.readings if (r.kv_highest or 0.0) >= KV_FULL), None)
    if stretch.ended and not broken_off:
        return _over(stretch, lengths, full_at)
    rng = np.random.default_rng(seed)
    found = draw_laws(flight, series.kv_capacity_tokens, max_tokens, lengths, DRAWS, rng)
    capacity = kv_capacity(series, flight, found, max_tokens)
    middle = replay(found.flights[0], found.chance(0), max_tokens, rng)
    models = step_draws(series, flight, middle[2], capacity, found.prompt_tokens, DRAWS, rng)
    limits = run_limits(series, flight, capacity, max_tokens, found.prompt_tokens)
    draws = [_simulate(found, i, series.engines, *models[i], limits, max_tokens, rng) for i in range(DRAWS)]
    low, centre, high = interval_of([math.log(max(0.5, seconds)) for seconds, _ in draws])
    if full_at is None:
        full_at = _full_at([full for _, full in draws], stretch.elapsed_s)
    source = "observed+prior" if lengths is None else lengths.law.source
    return FollowForecast(
        elapsed_s=round(stretch.elapsed_s, 1),
        forecast_s=round(stretch.elapsed_s + math.exp(centre), 1),
        remaining_s=round(math.exp(centre), 1),
        low_s=round(stretch.elapsed_s + math.exp(low), 1),
        high_s=round(stretch.elapsed_s + math.exp(high), 1),
        level=LEVEL,
        done=False,
        length_source=source,
        kv_full_at_s=None if full_at is None else round(full_at, 1),
        limits=_unknown(flight, stretch, capacity, lengths, broken_off),
    )


def interval_of(logs: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, middle and upper end of the logarithm of the remaining time.

    Each side has its own spread, from the outer twentieth of the draws: a few answers that may never end make
    the upper side long and leave the lower one as it is.
    """
    ordered, centre = sorted(logs), statistics.median(logs)
    outer = SIDE_SHARE * (len(ordered) - 1)
    first, last = ordered[round(outer)], ordered[-1 - round(outer)]
    below, above = ((abs(centre - end)) / SIDE_QUANTILE for end in (first, last))
    return centre - REACH * math.hypot(below, MODEL_SD), centre, centre + REACH * math.hypot(above, MODEL_SD)


def _over(stretch: RunStretch, lengths: AnswerLengths | None, full_at: float | None) -> FollowForecast:
    elapsed = round(stretch.elapsed_s, 1)
    return FollowForecast(
        elapsed_s=elapsed,
        forecast_s=elapsed,
        remaining_s=0.0,
        low_s=elapsed,
        high_s=elapsed,
        level=LEVEL,
        done=True,
        length_source="observed" if lengths is None else lengths.law.source,
        kv_full_at_s=None if full_at is None else round(full_at, 1),
        limits=stretch.notes,
    )


def _simulate(
    found: LawDraws,
    number: int,
    engines: int,
    model: StepModel,
    recompute_factor: float,
    limits: EngineLimits,
    max_tokens: int,
    rng: np.random.Generator,
) -> tuple[float, float | None]:
    """Seconds from now to the end in one draw, and to the first moment of a full cache."""
    flight, law, table = found.flights[number], found.chosen[number], found.table
    prompt = flight.prompt_tokens or USUAL_PROMPT
    population, _, _ = replay(flight, found.chance(number), max_tokens, rng)
    fresh = _fresh(flight, population)
    alive = table.lengths(law, population.ages, rng)
    new = table.lengths(law, np.zeros(fresh), rng)
    factor = max(1.0, (len(alive) + fresh) / COPY_ABOVE)
    factor = min(factor, max(1.0, min(flight.concurrency, len(alive) + fresh) / engines / COPY_FLIGHT))
    kept = np.sort(rng.permutation(len(alive))[: max(min(1, len(alive)), round(len(alive) / factor))])
    new = new[: max(min(1, fresh), round(fresh / factor))]
    resident = [
        SimRequest(id=f"r{i}", prompt_tokens=max(1, round(prompt + a)), output_tokens=max(1, round(length - a)))
        for i, (a, length) in enumerate(zip(population.ages[kept], alive[kept], strict=True))
    ]
    requests = [
        SimRequest(id=f"n{i}", prompt_tokens=max(1, round(prompt)), output_tokens=max(1, round(length)))
        for i, length in enumerate(new)
    ]
    small = dataclasses.replace(
        limits,
        kv_tokens=max(round(limits.kv_tokens / factor), round(2 * (max_tokens + prompt))),
        max_num_seqs=max(1, round(limits.max_num_seqs / factor)),
        max_num_batched_tokens=max(64, round(limits.max_num_batched_tokens / factor)),
        hit_share=HIT_SHARE[0] + (HIT_SHARE[1] - HIT_SHARE[0]) * (number + 0.5) / DRAWS,
        recompute_factor=recompute_factor,
    )
    level = max(1, round(flight.concurrency / factor), len(resident))
    least_s = sum(r.output_tokens for r in (*resident, *requests)) / level * model.t0_s
    run = run_closed_loop(
        copied(model, factor),
        small,
        requests,
        level,
        engines=engines,
        resident=resident,
        sample_s=max(SAMPLE_S, least_s / SAMPLES),
    )
    full = next((s.t_s for s in run.samples if s.kv_usage >= KV_FULL), None)
    return run.makespan_s, full


def _fresh(flight: Flight, population: Population) -> int:
    """Requests that were not sent yet."""
    if flight.at_once or flight.draining:
        return 0
    return max(0, flight.requests - population.sent)


def _full_at(times: Sequence[float | None], elapsed_s: float) -> float | None:
    """Middle of the draws in which the cache fills, if it does in most."""
    seen = sorted(t for t in times if t is not None)
    if len(seen) <= len(times) / 2:
        return None
    return elapsed_s + statistics.median(seen)


def _unknown(
    flight: Flight, stretch: RunStretch, capacity: float | None, lengths: AnswerLengths | None, broken_off: bool
) -> tuple[str, ...]:
    found, finished = list(stretch.notes), flight.finished
    if lengths is None:
        found.append("answers longer than those seen so far: a broad prior up to the output limit")
    if not flight.at_once and finished is None:
        found.append("how many answers have ended is not seen: it follows from the KV cache and the prior")
    if capacity is None:
        found.append("size of the KV cache is not known: preemption is not foreseen")
    if flight.readings[0].prompt_tokens is None:
        found.append(f"prompt lengths are not seen: {USUAL_PROMPT:.0f} tokens are assumed")
    if stretch.restarted:
        found.append("the server began anew after the last reading: the forecast is as if it had gone on")
    if broken_off and stretch.ended:
        found.append("nothing is in flight, but fewer answers ended than there are requests")
    levels = {round(r.in_flight / max(1, flight.concurrency), 1) for r in stretch.readings}
    if len(levels) == 1:
        found.append("the speed at fewer sequences in flight was not seen: the end of the run rests on a prior")
    return tuple(found)
