"""Windows on the simulator against the long run of the same hidden server."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autotune.engines.sim import SimEngine, SimWorld, Truth
from autotune.hub import known_config
from autotune.measure.judge import Known, judge
from autotune.measure.stationary import Prompt, fresh_lengths, stationary_load
from autotune.physics.closed_loop import ServerSim
from autotune.physics.gpus import parse_gpus
from autotune.physics.laws import LengthLaw, lognormal_law
from autotune.physics.lengths import AnswerLengths, KnownLength, observed_lengths
from autotune.physics.model_card import ModelCard
from autotune.physics.simulator import SimRequest
from autotune.physics.stepstart import from_card
from autotune.physics.steptime import StepModel
from autotune.records.lengths import AnswerLength, Lengths
from autotune.records.load import LoadPlan
from autotune.records.measurement import Measurement
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, MeasureSpec

MODEL = "Qwen/Qwen3-32B"
GPUS = {1: "1xH200", 2: "2xH200"}
"""By tensor-parallel size."""
LIMITS = {1_000: 3_584, 4_000: 14_336, 12_000: 32_768}
"""Output limit by mean answer (before the cut): 3.6 times the mean, as the loads on real H200s had it, or less."""
SIGMA = 0.8
IDS = range(1_000, 10_000)


@cache
def prompts(count: int = 500) -> tuple[Prompt, ...]:
    """Of 100 to 500 tokens."""
    rng = random.Random("prompts")
    return tuple(Prompt(id=f"q{i}", tokens=tuple(rng.choices(IDS, k=rng.randint(100, 500)))) for i in range(count))


def law_of_mean(mean: int) -> LengthLaw:
    return lognormal_law(mean=mean, sigma=SIGMA, max_tokens=LIMITS[mean])


@dataclass(frozen=True, kw_only=True)
class Server:
    """One hidden server, answers of a mean length, and a number in flight."""

    tp: int
    mean: int
    seed: int
    kv_share: float = 0.72
    """Of the cache, in the long run."""

    @property
    def settings(self) -> Settings:
        return Settings(tensor_parallel_size=self.tp, max_num_seqs=1024, max_model_len=36_864)

    @property
    def engine(self) -> SimEngine:
        spec = EngineSpec(kind="sim", model=MODEL, gpus=GPUS[self.tp])
        return SimEngine(spec, world=SimWorld(self.seed, oom_above=1.0))

    @property
    def truth(self) -> Truth:
        return self.engine.hidden_truth(self.settings)

    @property
    def law(self) -> LengthLaw:
        return law_of_mean(self.mean)

    @property
    def concurrency(self) -> int:
        per_request = sum(len(p.tokens) for p in prompts()) / len(prompts()) + self.law.age_mean
        return max(1, int(self.kv_share * self.truth.fit.kv_capacity_tokens / per_request))

    @property
    def physics(self) -> StepModel:
        """What is known of its steps before anything is measured."""
        found = known_config(MODEL)
        card = ModelCard.from_config(found.config, found.name)
        return from_card(card, parse_gpus(GPUS[self.tp]), self.settings)

    def probe(self, answers: int) -> AnswerLengths:
        """Lengths as so many answers tell them."""
        drawn = self.law.sample(answers, random.Random(f"probe {self.seed} {self.mean}"))
        limit = LIMITS[self.mean]
        lengths = tuple(AnswerLength(tokens=t, ended=t < limit) for t in drawn)
        return observed_lengths(
            Lengths(prompt_tokens=(), answers=lengths, max_tokens=limit, source="probe"), limit, prior=True
        )

    def known(self) -> AnswerLengths:
        return KnownLength(uncut=self.law, max_tokens=LIMITS[self.mean])


def long_rate(server: Server, concurrency: int, *, lives: int = 25, skipped: int = 3) -> float:
    """Output tokens/s over so many answers for each place in flight, without any noise, after the first ones.

    Independent of what is tested: answers start fresh and are drawn from the law, nothing is forced or corrected.
    """
    truth = server.truth
    sim = ServerSim(truth.model, truth.limits, engines=truth.engines)
    rng = random.Random(f"truth {server.seed} {server.mean}")
    lengths, asked = fresh_lengths(server.law, rng), prompts()
    sent = done = begun_tokens = 0
    begun_s = 0.0

    def send(first: bool = False) -> None:
        nonlocal sent
        length, prompt = next(lengths), len(asked[sent % len(asked)].tokens)
        # The first wave ends at scattered times, or it would come back as a wave for a long time.
        left = max(1, int(length * rng.random())) if first else length
        sim.submit(SimRequest(id=str(sent), prompt_tokens=prompt, output_tokens=left))
        sent += 1

    for _ in range(concurrency):
        send(first=True)
    while done < lives * concurrency:
        ended = sim.advance(math.inf)
        for _ in ended:
            send()
        before, done = done, done + len(ended)
        if before < skipped * concurrency <= done:
            begun_s, begun_tokens = sim.now_s, sim.sample.generated_tokens
    return (sim.sample.generated_tokens - begun_tokens) / (sim.now_s - begun_s)


def measured(
    server: Server,
    answers: AnswerLengths,
    *,
    concurrencies: Sequence[int],
    prior: StepModel | None,
    spec: MeasureSpec | None = None,
    seed: int | None = None,
) -> list[Measurement]:
    """Stationary loads inside one start, each judged with those before it."""
    measure = spec or MeasureSpec()
    loads: list[Measurement] = []
    with server.engine.session(server.settings) as session:
        for index, concurrency in enumerate(concurrencies):
            load = stationary_load(
                answers.law,
                prompts(),
                concurrency=concurrency,
                refill=6 * concurrency,
                seed=server.seed if seed is None else seed,
                salt=f"load-{index}",
                ids=IDS,
            )
            known = Known(load=load, answers=answers, model=prior)
            plan = LoadPlan(start=load.start, refill=load.refill, request_limit_s=1e6)
            seen = session.observe(plan, stop=known.rule(measure))
            loads.append(judge(seen, measure, session.capacity, known=known, earlier=loads))
    return loads
