"""How long a planned run will take, with an interval from everything that is not known; the best concurrency.

One simulation of the whole run gives the point. Its interval comes from draws of the step constants, of the
answers' law and of the prefix-cache hits of preempted sequences, all together, through smaller copies of
the run (a copy by f has 1/f of the requests, of the concurrency and of the cache, and steps that take as
long): a draw's copy over the undrawn copy is the factor on the makespan. What the copies leave out, the
chance of which lengths the run happens to get, is added from the law.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.physics.closed_loop import ClosedLoopRun, ServerSample, run_closed_loop
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths import AnswerLengths
from autotune.physics.simulator import EngineLimits, SimRequest
from autotune.physics.steptime import StepModel
from autotune.records.forecast import Forecast

LEVEL = 0.95
DRAWS = 32
COPY_REQUESTS, COPY_FLIGHT = 300, 12
"""A copy keeps at least so many requests, and so many in flight on one engine."""
COPY_ROUNDS = 20
"""A run of more requests than this for each place in flight is shortened in its copies: its middle is steady."""
CHANCE_RUNS, CHANCE_EVENTS = 8, 24_000
"""So many runs of full size with lengths by chance, as long as all of them together have fewer requests and
preemptions than this; below three of them the law's own spread stands in."""
SIMULATOR_SD = 0.015
"""Relative error of the simulator itself: what step noise and the router do that it does not."""
HIT_SHARE = (0.0, 0.6)
"""Range of the share of a preempted sequence that the prefix cache still holds (one run: 0.4)."""
SAMPLES = 200
"""Samples of the series over a run."""
FLAT = 0.005
"""Concurrencies whose makespans are so close are equal: the smallest is taken."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is to be forecast."""

    requests: int
    concurrency: int
    """In flight over all engines."""
    limits: EngineLimits
    """Of one engine; its ``hit_share`` is replaced by ``hit_range``."""
    prompts: LengthLaw
    answers: AnswerLengths
    engines: int = 1
    hit_range: tuple[float, float] = HIT_SHARE

    @property
    def longest(self) -> float:
        """Tokens of the largest request there may be."""
        return self.prompts.tokens[-1] + self.answers.law.tokens[-1]


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """A forecast and the simulated run behind it."""

    forecast: Forecast
    samples: tuple[ServerSample, ...]
    """Throughput, KV use and preemptions over time."""
    preemptions: int
    kv_peak: float
    kv_full_s: float | None
    """First preemption; ``None``: never."""
    factor_sd: Sequence[float]
    """Standard deviation of the makespan's logarithm: all together; by the chance of lengths alone."""


def simulate_run(
    plan: RunPlan,
    model: StepModel,
    law: LengthLaw,
    *,
    hit_share: float,
    seed: int | None = None,
    sample_s: float = math.inf,
) -> ClosedLoopRun:
    """One simulated run; lengths are by chance from ``law``, or (no seed) the middles of equal shares."""
    rng = random.Random(seed or 0)
    answers = law.sample(plan.requests, rng) if seed is not None else law.stratified(plan.requests, rng, middle=True)
    prompts = plan.prompts.stratified(plan.requests, rng)
    requests = [
        SimRequest(id=str(i), prompt_tokens=p, output_tokens=a)
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    limits = dataclasses.replace(plan.limits, hit_share=hit_share)
    return run_closed_loop(model, limits, requests, plan.concurrency, engines=plan.engines, sample_s=sample_s)


def forecast_run(
    model: StepModel,
    plan: RunPlan,
    *,
    startup_s: float = 0.0,
    draws: int = DRAWS,
    seed: int = 0,
    limits: tuple[str, ...] = (),
) -> RunForecast:
    """Makespan, first send to last end, with a 95 % interval.

    Args:
        limits: what the caller knows that the forecast does not know, in words.

    Raises:
        ValueError: the cache of one engine cannot hold the longest request.
    """
    if plan.longest > plan.limits.kv_tokens - plan.limits.block_size:
        raise ValueError(f"{plan.limits.kv_tokens} KV tokens cannot hold a request of {plan.longest:.0f} tokens")
    law = plan.answers.law.extended()
    middle_hit = sum(plan.hit_range) / 2
    rough = simulate_copy(plan, model, law, middle_hit)
    run = simulate_run(plan, model, law, hit_share=middle_hit, sample_s=max(rough.makespan_s / SAMPLES, 1e-3))
    factors = []
    rng = random.Random(seed + 1)
    for i in range(draws):
        hit = plan.hit_range[0] + (plan.hit_range[1] - plan.hit_range[0]) * ((i + 0.5) / draws)
        copy = simulate_copy(plan, model.draw(rng), plan.answers.draw(rng).extended(), hit)
        factors.append(math.log(copy.makespan_s / rough.makespan_s))
    shift, chance_sd = _chance(plan, model, law, middle_hit, run, seed)
    makespan_s = run.makespan_s * math.exp(shift)
    centre, spread = spread_of(factors, chance_sd, SIMULATOR_SD)
    reach = student_quantile(draws - 1) * spread
    forecast = Forecast(
        requests=plan.requests,
        makespan_s=makespan_s,
        low_s=makespan_s * math.exp(min(0.0, centre - reach)),
        high_s=makespan_s * math.exp(max(0.0, centre + reach)),
        level=LEVEL,
        startup_s=startup_s,
        output_tokens_per_s=_steady_rate(run),
        tail_share=(run.makespan_s - run.drain_s) / run.makespan_s,
        truncated_share=plan.answers.law.cut_share,
        length_source=law.source,
        limits=(*limits, *_limits_of(model, law)),
    )
    return RunForecast(
        forecast=forecast,
        samples=run.samples,
        preemptions=run.end.preemptions,
        kv_peak=max((s.kv_usage for s in run.samples), default=0.0),
        kv_full_s=run.kv_full_s,
        factor_sd=(spread, chance_sd),
    )


def _chance(
    plan: RunPlan, model: StepModel, law: LengthLaw, hit_share: float, run: ClosedLoopRun, seed: int
) -> tuple[float, float]:
    """Mean of the makespan's logarithm over runs with lengths by chance, less that of ``run``, and its spread."""
    count = min(CHANCE_RUNS, CHANCE_EVENTS // (plan.requests + run.end.preemptions))
    if count < 3:
        return 0.0, law.sd / law.mean / math.sqrt(plan.requests)
    runs = (simulate_run(plan, model, law, hit_share=hit_share, seed=seed + i + 1) for i in range(count))
    logs = [math.log(r.makespan_s / run.makespan_s) for r in runs]
    return statistics.fmean(logs), statistics.stdev(logs)


def simulate_copy(plan: RunPlan, model: StepModel, law: LengthLaw, hit_share: float) -> ClosedLoopRun:
    """One engine's share of the run, made smaller where that loses little."""
    requests, flight = plan.requests / plan.engines, min(plan.concurrency, plan.requests) / plan.engines
    factor = max(1.0, min(requests / COPY_REQUESTS, flight / COPY_FLIGHT))
    # The cache of a copy still holds the longest request, twice.
    factor = max(1.0, min(factor, plan.limits.kv_tokens / (2 * plan.longest + plan.limits.block_size)))
    concurrency = max(1, round(flight / factor))
    kept = min(requests / factor, max(COPY_REQUESTS, COPY_ROUNDS * concurrency))
    small = dataclasses.replace(
        plan,
        requests=max(1, round(kept)),
        concurrency=concurrency,
        engines=1,
        limits=dataclasses.replace(
            plan.limits,
            kv_tokens=round(plan.limits.kv_tokens / factor),
            max_num_seqs=max(1, round(plan.limits.max_num_seqs / factor)),
            max_num_batched_tokens=max(16, round(plan.limits.max_num_batched_tokens / factor)),
        ),
    )
    return simulate_run(small, copied(model, factor), law, hit_share=hit_share)


def copied(model: StepModel, factor: float) -> StepModel:
    """Steps of a copy by ``factor``: as long as those of the original at ``factor`` times the batch."""
    scaled = model.scaled(
        sequence_s=factor, kv_token_s=factor, prefill_token_s=factor, beyond_s=factor, compute_s=factor
    )
    return dataclasses.replace(
        scaled,
        graph_limit=max(1, round(model.graph_limit / factor)),
        expert_share=1.0 - (1.0 - model.expert_share) ** factor,
    )


def spread_of(factors: Sequence[float], *more: float) -> tuple[float, float]:
    """Mean of logarithms, and their standard deviation with further independent ones added."""
    centre = statistics.fmean(factors) if factors else 0.0
    own = statistics.stdev(factors) if len(factors) > 1 else 0.0
    return centre, math.sqrt(own**2 + sum(sd**2 for sd in more))


def student_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t (Cornish-Fisher; within 0.2 % from 5 degrees on)."""
    z, n = 1.959964, max(3, freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n) + third


def best_of(measure: Callable[[int], float], low: int, high: int) -> int:
    """The whole number between ``low`` and ``high`` with the least ``measure``, coarse to fine.

    Powers of two first, then the gap around the best is halved until it is under 6 %. Of results within
    ``FLAT`` of the best the smallest number is taken.
    """
    seen: dict[int, float] = {}

    def at(number: int) -> float:
        if number not in seen:
            seen[number] = measure(number)
        return seen[number]

    grid = [low]
    while grid[-1] < high:
        grid.append(min(high, grid[-1] * 2))
    best = min(grid, key=at)
    step = 2.0
    while step > 1.06:
        step = math.sqrt(step)
        near = {max(low, min(high, round(best * f))) for f in (1 / step, step)}
        best = min([best, *sorted(near)], key=at)
    flat = [n for n in seen if seen[n] <= seen[best] * (1 + FLAT)]
    return min(flat)


def _steady_rate(run: ClosedLoopRun) -> float:
    """Output tokens/s in the second half of the time before the last send; of the whole run if that is short."""
    inside = [s for s in run.samples if run.drain_s / 2 <= s.t_s <= run.drain_s]
    if len(inside) < 3:
        return run.end.generated_tokens / run.makespan_s
    tokens = inside[-1].generated_tokens - inside[0].generated_tokens
    return tokens / (inside[-1].t_s - inside[0].t_s)


def _limits_of(model: StepModel, law: LengthLaw) -> tuple[str, ...]:
    found = []
    if model.guesses:
        found.append(f"step constants not measured here: {', '.join(model.guesses)}")
    if law.source.endswith("prior"):
        found.append("part of the length law is a prior, not observed")
    return tuple(found)
