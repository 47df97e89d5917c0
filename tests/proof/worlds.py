"""Random worlds for the forecast's coverage: constants, lengths and hit rates wider than the predictor's priors."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from autotune.physics.closed_loop import ServerSample, ServerSim, run_closed_loop
from autotune.physics.laws import LengthLaw, law_of, lognormal_law
from autotune.physics.simulator import EngineLimits, Noise, SimRequest
from autotune.physics.stepfit import PrefillBurst, StepWindow
from autotune.physics.stepstart import physics_model
from autotune.physics.steptime import StepModel

PARAMETERS = {"8b": (8.0e9, 131_072, 32, 4096), "32b": (32.8e9, 262_144, 64, 5120), "70b": (70.6e9, 327_680, 80, 8192)}
WORLD_SD = {"t0_s": 0.35, "sequence_s": 0.9, "kv_token_s": 0.4, "prefill_token_s": 0.4, "beyond_s": 1.2}
"""Wider than the predictor's 0.1-0.3, 0.6, 0.3, 0.3, 0.8."""
STEP_NOISE, START_NOISE = 0.03, 0.01
HITS = (0.0, 0.9)


@dataclass(frozen=True)
class World:
    start: StepModel
    truth: StepModel
    limits: EngineLimits
    engines: int
    answers: LengthLaw
    prompts: LengthLaw
    requests: int
    concurrency: int
    seed: int

    def noise(self) -> Noise:
        rng = random.Random(self.seed * 7 + 1)
        return lambda: math.exp(rng.gauss(0.0, STEP_NOISE))

    def requests_of(self, seed: int, count: int) -> list[SimRequest]:
        rng = random.Random(seed)
        answers, prompts = self.answers.sample(count, rng), self.prompts.sample(count, rng)
        return [
            SimRequest(id=str(i), prompt_tokens=p, output_tokens=a)
            for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
        ]


def random_answers(rng: random.Random, limit: int) -> LengthLaw:
    """Lognormal, gamma, Weibull, two groups, uniform: cut at the limit."""
    mean = limit * math.exp(rng.uniform(math.log(0.08), math.log(1.1)))
    kind = rng.choice(["lognormal", "gamma", "weibull", "two", "uniform", "endless"])
    if kind == "lognormal":
        return lognormal_law(mean=mean, sigma=rng.uniform(0.3, 1.2), max_tokens=limit)
    draws = 4000
    if kind == "gamma":
        shape = rng.uniform(0.8, 5)
        values = [rng.gammavariate(shape, mean / shape) for _ in range(draws)]
    elif kind == "weibull":
        shape = rng.uniform(0.8, 3)
        values = [rng.weibullvariate(mean / math.gamma(1 + 1 / shape), shape) for _ in range(draws)]
    elif kind == "uniform":
        values = [rng.uniform(0.1, 1.9) * mean for _ in range(draws)]
    else:
        share = rng.uniform(0.05, 0.5) if kind == "two" else rng.uniform(0.02, 0.3)
        second = mean * rng.uniform(0.05, 0.4) if kind == "two" else 1e9
        values = [
            second * rng.lognormvariate(0, 0.5) if rng.random() < share else mean * rng.lognormvariate(0, 0.6)
            for _ in range(draws)
        ]
    return law_of([(float(max(1, round(v))), 1.0) for v in values], kind).capped(limit)


def random_world(seed: int, *, spread: float = 1.0) -> World:
    rng = random.Random(seed)
    parameters, kv_bytes, layers, hidden = PARAMETERS[rng.choice(list(PARAMETERS))]
    tp = rng.choice([1, 2, 4, 8] if parameters < 60e9 else [2, 4, 8])
    engines = rng.choice([1, 1, 2, 4])
    bandwidth, flops, memory = rng.choice([(4.3e12, 790e12, 141e9), (3.0e12, 790e12, 80e9), (1.9e12, 280e12, 80e9)])
    start = physics_model(
        weight_bytes=2 * parameters / tp,
        kv_bytes_per_token=kv_bytes / tp,
        active_parameters=parameters,
        layers=layers,
        hidden_size=hidden,
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=flops,
        gpus=tp,
    )
    common = rng.gauss(0, START_NOISE)
    truth = start.scaled(**{name: math.exp(rng.gauss(0, spread * sd) + common) for name, sd in WORLD_SD.items()})
    limit = rng.choice([2048, 8192, 14_336, 16_384, 32_768])
    answers = random_answers(rng, limit)
    prompts = lognormal_law(mean=rng.choice([150, 300, 1000]), sigma=0.5, max_tokens=4096)
    kv_tokens = int(max((0.85 * memory - 2 * parameters / tp) * tp / kv_bytes, 8 * (limit + 1024)))
    requests = rng.choice([300, 1000, 2158])
    concurrency = min(requests, engines * rng.choice([16, 32, 64, 128, 256, 512]))
    limits = EngineLimits(kv_tokens=kv_tokens, hit_share=rng.uniform(*HITS))
    return World(start, truth, limits, engines, answers, prompts, requests, concurrency, seed)


def true_makespan(world: World) -> float:
    run = run_closed_loop(
        world.truth,
        world.limits,
        world.requests_of(world.seed + 10_000, world.requests),
        world.concurrency,
        engines=world.engines,
        noise=world.noise(),
    )
    return run.makespan_s


def calibration_loads(world: World) -> list[int]:
    """About 8, 64 and the planned one on one engine, none of them near a full cache."""
    room = 0.8 * world.limits.kv_tokens / (world.prompts.mean + world.answers.age_mean)
    planned = max(2, min(world.concurrency // world.engines, int(room)))
    return sorted({min(8, max(1, planned // 2)), min(64, planned), planned})


def windows(world: World, concurrency: int, *, law: LengthLaw) -> tuple[list[StepWindow], list[PrefillBurst]]:
    """A stationary load on one engine: two windows of ten seconds once the contexts are prefilled, and the burst."""
    rng = random.Random(world.seed + 20_000 + concurrency)
    server = ServerSim(world.truth, world.limits, noise=world.noise())
    fresh = iter(world.requests_of(world.seed + 30_000 + concurrency, 20_000))
    for i in range(concurrency):
        length = law.biased_quantile((i + rng.random()) / concurrency)
        age = min(int(rng.random() * length), int(length) - 1)
        prompt = next(fresh).prompt_tokens
        server.submit(SimRequest(id=f"s{i}", prompt_tokens=prompt + age, output_tokens=int(length) - age))
    bursts: list[PrefillBurst] = []
    seconds: list[ServerSample] = []  # once the prompts of the last ten seconds are few
    filled, seen = None, [server.sample]
    for second in range(1, 401):
        while ended := server.advance(float(second)):
            for _ in ended:
                server.submit(next(fresh))
        sample = server.sample
        seen.append(sample)
        recent = sample.prompt_tokens - seen[max(0, second - 10)].prompt_tokens
        fastest = (
            max(b.prompt_tokens - a.prompt_tokens for a, b in zip(seen, seen[10:], strict=False)) if second > 9 else 0
        )
        if not seconds and sample.waiting and sample.kv_usage < 0.6 and sample.prompt_tokens > seen[-2].prompt_tokens:
            filled = sample
        elif seconds or (not sample.waiting and second > 9 and (recent < fastest / 4 or second > 60)):
            seconds.append(sample)
        if len(seconds) > 20:
            break
    if filled and filled.t_s >= 2:
        bursts.append(
            PrefillBurst(
                prompt_tokens_per_s=filled.prompt_tokens / filled.t_s,
                step_tokens=world.limits.max_num_batched_tokens,
                batch=filled.running / 2,
                kv_tokens=filled.kv_tokens / 2,
            )
        )
    return [window_of(seconds[i : i + 11]) for i in (0, 10) if len(seconds) > i + 10], bursts


def window_of(samples: list[ServerSample]) -> StepWindow:
    first, last = samples[0], samples[-1]
    span = last.t_s - first.t_s
    return StepWindow(
        batch=statistics.fmean(s.running for s in samples),
        kv_tokens=statistics.fmean(s.kv_tokens for s in samples),
        output_tokens_per_s=(last.generated_tokens - first.generated_tokens) / span,
        prompt_tokens_per_s=(last.prompt_tokens - first.prompt_tokens) / span,
        kv_usage=max(s.kv_usage for s in samples),
        waiting=last.waiting,
        preemptions=last.preemptions,
    )
