"""Settings in the order in which they are expected to finish a planned run, before any is started."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.physics.concurrency import best_concurrency
from autotune.physics.fluid import FluidRun, fluid_run, loop_shape
from autotune.physics.forecast import SIMULATOR_SD, spread_of, student_quantile
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths import AnswerLengths
from autotune.physics.simulator import EngineLimits
from autotune.physics.stepstart import engine_limits
from autotune.physics.steptime import StepModel
from autotune.planning.knowledge import Knowledge
from autotune.planning.space import layouts
from autotune.records.measurement import BottleneckKind
from autotune.records.settings import FlagValue, Settings

DRAWS = 24
"""Draws of constants and lengths behind an interval."""
KV_LIMIT = 1.0
"""The largest number in flight is that whose KV cache is just not full when answers that started together are
longest: a run with preemptions may be a few per cent faster, but is not stable."""
KV_BOUND = 0.9
"""KV demand from which on the cache is what keeps more from being in flight."""
MORE_SEQS = 1024
"""vLLM's default on large cards."""
PREFILL_SHARE = 0.4
"""Of the time of a step, from which on prompts are the limit."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The run that settings are ranked for."""

    requests: int
    prompts: LengthLaw
    answers: AnswerLengths
    """Cut at the run's ``max_tokens``."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of one set of flags; ``None`` and 0 where it does not fit."""

    settings: Settings
    fits: bool
    reason: str | None
    """Why it does not fit."""
    engines: int
    kv_capacity_tokens: int
    """Summed over engines."""
    concurrency: int | None = None
    """Best number in flight over all engines."""
    output_tokens_per_s: float | None = None
    """Of the steady state, all engines."""
    makespan_s: float | None = None
    low_s: float | None = None
    """95 % interval of the makespan; ``None``: not asked for."""
    high_s: float | None = None
    bottleneck: BottleneckKind | None = None


def rank(
    knowledge: Knowledge,
    candidates: Iterable[Settings],
    run: PlannedRun,
    *,
    fixed: Settings | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[Prediction, ...]:
    """Predictions, shortest makespan first, what does not fit last (in the order given).

    Args:
        fixed: flags that every candidate gets beside its own.
        draws: for the intervals; 0: none are computed.

    Raises:
        InputError: a flag that is no number where one is needed.
    """
    laws = _drawn_laws(run, draws, seed)
    found = [_predict(knowledge, settings, run, fixed or Settings(), laws, seed) for settings in candidates]
    return _sorted(found)


def rank_layouts(
    knowledge: Knowledge, run: PlannedRun, fixed: Settings | None = None, *, draws: int = DRAWS, seed: int = 0
) -> tuple[Prediction, ...]:
    """The best start of each TP x DP, ranked: what a search would begin with.

    Settings are complete (``fixed`` included). The rest is left to vLLM's defaults, except ``max_num_seqs`` where
    the default would keep out what the KV cache could hold, and expert parallelism where only it fits.

    Raises:
        InputError: as ``rank``.
    """
    kept = fixed or Settings()
    starts = [Settings({**kept, **layout}) for layout in layouts(knowledge.hardware.count, kept)]
    found = rank(knowledge, starts, run, draws=draws, seed=seed)
    changed = [p.settings.with_(**more) for p in found if (more := _remedy(p, knowledge, kept))]
    best: dict[tuple[object, object], Prediction] = {}
    for prediction in (*found, *rank(knowledge, changed, run, draws=draws, seed=seed)):
        layout = prediction.settings["tensor_parallel_size"], prediction.settings["data_parallel_size"]
        if layout not in best or (prediction.makespan_s or math.inf) < (best[layout].makespan_s or math.inf):
            best[layout] = prediction
    return _sorted(best.values())


def _remedy(prediction: Prediction, knowledge: Knowledge, kept: Settings) -> dict[str, FlagValue]:
    """Flags that may help a start which vLLM's defaults hold back; those that are ``kept`` stay."""
    if prediction.bottleneck == "sequences" and "max_num_seqs" not in kept:
        return {"max_num_seqs": MORE_SEQS}
    if not prediction.fits and knowledge.card.experts and "enable_expert_parallel" not in kept:
        return {"enable_expert_parallel": True}
    return {}


def _sorted(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    return tuple(sorted(predictions, key=lambda p: math.inf if p.makespan_s is None else p.makespan_s))


def _drawn_laws(run: PlannedRun, draws: int, seed: int) -> list[LengthLaw]:
    """Laws as likely as the best one, the same for all candidates."""
    rng = random.Random(seed)
    return [run.answers.draw(rng).extended() for _ in range(draws)]


def _predict(
    knowledge: Knowledge, settings: Settings, run: PlannedRun, fixed: Settings, laws: list[LengthLaw], seed: int
) -> Prediction:
    flags = Settings({**fixed, **settings})
    fit = knowledge.fit(flags)
    if not fit.fits:
        return Prediction(settings=settings, fits=False, reason=fit.reason, engines=fit.engines, kv_capacity_tokens=0)
    model, limits = knowledge.model(flags), limits_of(knowledge, flags, fit.kv_capacity_tokens, run)
    law, prompt = run.answers.law.extended(), run.prompts.mean
    concurrency, best = best_concurrency(
        model,
        limits,
        law,
        prompt_tokens=prompt,
        requests=run.requests,
        engines=fit.engines,
        kv_limit=KV_LIMIT,
    )
    factors = []
    rng = random.Random(seed)
    for drawn in laws:
        one = fluid_run(
            model.draw(rng),
            limits,
            loop_shape(drawn),
            prompt_tokens=prompt,
            requests=run.requests,
            concurrency=concurrency,
            engines=fit.engines,
        )
        factors.append(math.log(one.makespan_s / best.makespan_s))
    makespan_s = max(best.makespan_s, _longest_s(model, law, prompt, run.requests))
    chance_sd = law.sd / law.mean / math.sqrt(run.requests)
    centre, spread = spread_of(factors, chance_sd, SIMULATOR_SD)
    reach = student_quantile(len(laws) - 1) * spread
    return Prediction(
        settings=settings,
        fits=True,
        reason=None,
        engines=fit.engines,
        kv_capacity_tokens=fit.kv_capacity_tokens,
        concurrency=concurrency,
        output_tokens_per_s=best.output_tokens_per_s,
        makespan_s=makespan_s,
        low_s=makespan_s * math.exp(min(0.0, centre - reach)) if laws else None,
        high_s=makespan_s * math.exp(max(0.0, centre + reach)) if laws else None,
        bottleneck=_bottleneck(model, limits, best, concurrency, fit.engines, prompt, law),
    )


def limits_of(knowledge: Knowledge, flags: Settings, kv_tokens: int, run: PlannedRun) -> EngineLimits:
    """Limits of one engine of a server that says it holds ``kv_tokens`` (summed over engines).

    vLLM counts in requests of ``max_model_len``. Where layers have windows or states, requests as long as those
    of the run hold more tokens in the same blocks, or fewer.
    """
    card = knowledge.card
    if not card.uniform:
        fit = knowledge.fit(flags)
        held = fit.kv_capacity_at(round(run.prompts.mean + run.answers.law.age_mean))
        kv_tokens = max(kv_tokens, round(kv_tokens * held / max(1, fit.kv_capacity_tokens)))
    return engine_limits(card, knowledge.hardware, flags, kv_tokens)


def _longest_s(model: StepModel, law: LengthLaw, prompt: float, requests: int) -> float:
    """Time of the longest answer there will probably be, alone: a fluid of a handful of requests runs dry too soon."""
    longest = law.quantile(1.0 - 0.5 / requests)
    return longest * model.step_s(1, prompt + longest / 2)


def _bottleneck(
    model: StepModel,
    limits: EngineLimits,
    run: FluidRun,
    concurrency: int,
    engines: int,
    prompt: float,
    law: LengthLaw,
) -> BottleneckKind:
    """What would have to give for the steady state to be faster."""
    batch = concurrency / engines
    if run.kv_peak >= KV_BOUND:
        return "kv"
    if concurrency >= limits.max_num_seqs * engines:
        return "sequences"
    context = batch * (prompt + law.age_mean)
    prefill = batch * model.prefill_token_s * prompt / law.mean
    if prefill > PREFILL_SHARE * (model.step_s(batch, context) + prefill):
        return "prefill"
    arithmetic = model.compute_s * batch
    return "compute" if arithmetic > 0.5 * model.step_s(batch, context) else "bandwidth"
