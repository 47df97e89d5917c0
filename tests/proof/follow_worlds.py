"""Random runs under way, as a vLLM log would show them: models, cards, clients and lengths of many kinds."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from autotune.evaluation.follow_series import Reading, RunSeries
from autotune.hub import shipped
from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.gpus import parse_gpus
from autotune.physics.laws import LengthLaw, law_of, lognormal_law
from autotune.physics.memory import fits
from autotune.physics.model_card import ModelCard
from autotune.physics.simulator import EngineLimits, Noise, SimRequest
from autotune.physics.stepstart import from_card
from autotune.physics.steptime import StepModel

CARDS = ("8xH200", "8xH100", "8xA100-80GB", "8xB200", "8xMI300X", "8xL40S")
OFF_SD = {"t0_s": 0.25, "sequence_s": 0.4, "kv_token_s": 0.25, "prefill_token_s": 0.3, "beyond_s": 0.5}
"""How far real servers are from the physical start values."""
DRIFT_SD, DRIFT_S = 0.04, 120.0
"""Slow error of the step model on a real server: 4-5 % over minutes."""


@dataclass(frozen=True)
class Run:
    kind: str
    name: str
    series: RunSeries
    requests: int
    max_tokens: int
    truth_s: float
    kv_full_s: float | None
    law: LengthLaw
    model: StepModel


@functools.cache
def servers() -> list[tuple[str, StepModel, int]]:
    """Shipped models on cards where they fit: name, physical start values, KV tokens of one engine."""
    found = []
    for name, config in shipped().items():
        card = ModelCard.from_config(config, name)
        if card.parameters < 3e9:
            continue
        for cards in CARDS:
            hardware = parse_gpus(cards)
            for tp in (1, 2, 4, 8):
                settings = {"tensor_parallel_size": tp, "max_model_len": min(card.max_model_len, 40_960)}
                if card.tp_problem(tp):
                    continue
                fit = fits(card, hardware, settings)
                if fit.fits and fit.kv_capacity_tokens > 150_000:
                    found.append(
                        (f"{name} {cards} TP {tp}", from_card(card, hardware, settings), fit.kv_capacity_tokens)
                    )
    return found


def random_law(rng: random.Random, limit: int) -> LengthLaw:
    """Answers of reasoning and chat models: a main group, short ones, and perhaps some that never end."""
    mean = limit * math.exp(rng.uniform(math.log(0.12), math.log(0.9)))
    if rng.random() < 0.6:
        main = lognormal_law(mean=mean, sigma=rng.uniform(0.6, 1.1), max_tokens=None)
    else:
        shape = rng.uniform(0.9, 1.5)
        scale = mean / math.gamma(1 + 1 / shape)
        pairs = [(scale * (-math.log(1 - (i + 0.5) / 1000)) ** (1 / shape), 1.0) for i in range(1000)]
        main = law_of([(max(1.0, t), w) for t, w in pairs], "weibull")
    pairs = [(t, w) for t, w in zip(main.tokens, main.weights, strict=True)]
    short, endless = rng.choice([0.0, rng.uniform(0.02, 0.3)]), rng.choice([0.0, rng.uniform(0.005, 0.15)])
    if short:
        other = lognormal_law(mean=mean * rng.uniform(0.05, 0.4), sigma=0.7, max_tokens=None)
        pairs = [(t, w * (1 - short)) for t, w in pairs]
        pairs += [(t, w * short) for t, w in zip(other.tokens, other.weights, strict=True)]
    pairs = [(t, w * (1 - endless)) for t, w in pairs] + [(1e7, endless)]
    return law_of([(max(1.0, t), w) for t, w in pairs if w > 0], "random").capped(limit)


def drifting(rng: random.Random) -> Noise:
    """A factor on the steps' duration that wanders slowly, beside a little white noise."""
    state = [rng.gauss(0.0, DRIFT_SD)]

    def factor() -> float:
        keep = math.exp(-1.0 / DRIFT_S)
        state[0] = keep * state[0] + math.sqrt(1 - keep * keep) * rng.gauss(0.0, DRIFT_SD)
        return math.exp(state[0] + rng.gauss(0.0, 0.03))

    return factor


def random_run(seed: int, *, columns: str = "all", line_s: float = 10.0) -> Run:
    """One run and its lines.

    Args:
        columns: ``all``; ``gauges``: no prompt rate and no capacity, as a CSV of five columns has it.
    """
    rng = random.Random(seed)
    name, start, capacity = rng.choice(servers())
    model = start.scaled(**{n: math.exp(rng.gauss(0, sd)) for n, sd in OFF_SD.items()})
    limit = rng.choice([4096, 8192, 14_336, 16_384, 32_768])
    law = random_law(rng, limit)
    kind = rng.choice(["at once", "at once", "closed loop", "closed loop", "queue"])
    requests = rng.choice([100, 300, 1000, 2158])
    engines = rng.choice([1, 1, 1, 2])
    concurrency = min(rng.choice([16, 32, 64, 128, 180, 256]) * engines, requests // 2)
    seqs = 1024 if kind != "queue" else max(8, round(requests / engines / rng.choice([2, 4, 8])))
    limits = EngineLimits(
        kv_tokens=max(capacity, 3 * limit),
        max_num_seqs=seqs,
        max_num_batched_tokens=8192,
        hit_share=rng.uniform(0.0, 0.6),
    )
    prompts = lognormal_law(mean=rng.choice([120, 300, 900]), sigma=0.5, max_tokens=4096)
    answers, asked = law.sample(requests, rng), prompts.sample(requests, rng)
    todo = [
        SimRequest(id=str(i), prompt_tokens=p, output_tokens=a)
        for i, (p, a) in enumerate(zip(asked, answers, strict=True))
    ]
    run = run_closed_loop(
        model,
        limits,
        todo,
        requests if kind != "closed loop" else concurrency,
        engines=engines,
        sample_s=line_s,
        noise=drifting(rng),
    )
    readings: list[Reading] = []
    before, full = None, None
    for sample in [*run.samples, run.end]:
        t_s = line_s * (len(readings) + 1) if sample is run.end else sample.t_s
        written = sample.generated_tokens - (before.generated_tokens if before else 0)
        asked_now = sample.prompt_tokens - (before.prompt_tokens if before else 0)
        highest, usage = round(sample.kv_usage, 3), round(sample.kv_tokens / limits.kv_tokens / engines, 3)
        full = t_s if full is None and highest >= 0.99 else full
        readings.append(
            Reading(
                t_s=t_s,
                span_s=line_s,
                output_tokens=float(written),
                running=sample.running,
                waiting=sample.waiting,
                kv_usage=usage,
                kv_highest=highest,
                prompt_tokens=float(asked_now) if columns == "all" else None,
            )
        )
        before = sample
    series = RunSeries(
        readings=tuple(readings),
        source="log",
        engines=engines,
        kv_capacity_tokens=limits.kv_tokens * engines if columns == "all" else None,
    )
    return Run(kind, name, series, requests, limit, run.makespan_s, full, law, model)
