"""What a planned run will take: its length laws where they are known, and the forecast of a trial's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.errors import InputError
from autotune.evaluation.loads import asked
from autotune.hub import known_config
from autotune.physics.forecast import RunPlan, forecast_run
from autotune.physics.gpus import Hardware, parse_gpus
from autotune.physics.laws import HLE_LAW, LAW_SD, SHIPPED, LengthLaw, law_of, lognormal_law, shipped_law
from autotune.physics.layout import read_layout
from autotune.physics.lengths import AnswerLengths, KnownLength, observed_lengths, prompt_law
from autotune.physics.lengths_files import parse_lengths
from autotune.physics.model_card import ModelCard
from autotune.physics.rules import rules_for
from autotune.planning.knowledge import learn
from autotune.planning.ranking import PlannedRun, limits_of
from autotune.planning.space import kept_flags
from autotune.records.forecast import Forecast
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult, WorkloadSpec
from autotune.spec import StudySpec
from autotune.workloads import load
from autotune.workloads.synthetic import LAW_REQUESTS, PROMPT_SPREAD, REQUESTS

MEAN_SD = 0.10
"""Relative error of all lengths together, of a mean that somebody gives."""
CHARACTERS = 4
"""Of a token, about."""
PROMPT_ATOMS = 50
LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def known_run(workload: WorkloadSpec, *, lengths: str | None = None, requests: int | None = None) -> PlannedRun | None:
    """A run whose lengths are known before anything is measured; ``None`` where they are not.

    Args:
        workload: ``synthetic`` (its own lengths), or any with ``lengths``.
        lengths: a file of observed lengths, or a shipped law by name.
        requests: of the run; ``None``: as many as the workload has when nobody says.

    Raises:
        InputError: the file cannot be read, or holds no lengths.
    """
    if workload.name != "synthetic" and lengths is None:
        return None
    return _known(workload, lengths, requests, 0.0)


def planned_run(
    card: ModelCard,
    hardware: Hardware,
    fixed: Settings,
    workload: WorkloadSpec,
    *,
    lengths: str | None = None,
    mean_output: int | None = None,
    requests: int | None = None,
) -> tuple[Settings, PlannedRun]:
    """A run that nothing was measured of, and the flags that every candidate for it gets.

    Lengths are those given, else the shipped law with what may be wrong with it. Answers are cut where the context
    ends. Prompts of a file of questions are counted at four characters a token: a tokenizer takes seconds to load.

    Args:
        fixed: flags that the user wants.
        lengths: a file of observed lengths, or a shipped law by name.
        mean_output: mean of the answers, tokens, before they are cut: a lognormal law.
        requests: of the run; ``None``: as many as the workload has.

    Raises:
        InputError: both lengths and a mean are given, a file cannot be read, or no prompt leaves room for an answer.
    """
    if lengths is not None and mean_output is not None:
        raise InputError("lengths and a mean output length are two answers to one question", hint="give one of them")
    prompts: LengthLaw | None = None
    if workload.name == "jsonl":
        questions = load(workload).questions
        requests = requests or len(questions)
        prompts = law_of([(float(max(1, q.size // CHARACTERS)), 1.0) for q in questions], "characters / 4")

    def cut_at(max_tokens: int) -> PlannedRun:
        cut = replace(workload, name="synthetic", max_tokens=max_tokens)
        cut = cut if workload.name == "synthetic" else replace(cut, law=HLE_LAW)
        run = _known(cut, lengths, requests, LAW_SD)
        if mean_output is not None:
            uncut = lognormal_law(mean=mean_output, sigma=workload.sigma, max_tokens=None)
            run = replace(run, answers=KnownLength(uncut=uncut, max_tokens=max_tokens, scale_sd=MEAN_SD))
        return run if prompts is None else replace(run, prompts=prompts)

    run = cut_at(workload.max_tokens)
    longest = math.ceil(run.prompts.tokens[-1])
    flags = kept_flags(card, hardware, fixed, max_tokens=workload.max_tokens, longest_prompt=longest)
    length = min(card.max_model_len, read_layout(flags, card, hardware.gpu, rules_for(None)).max_model_len)
    if longest >= length:
        raise InputError(
            f"prompts of up to {longest} tokens leave no room for an answer in a context of {length}",
            hint="raise max_model_len, or leave the longest prompts out",
        )
    return flags, run if longest + workload.max_tokens <= length else cut_at(length - longest)


def forecast_of(spec: StudySpec, best: TrialResult, results: Sequence[TrialResult]) -> Forecast | None:
    """How long the study's run will take with a trial's settings, at the number in flight of its best load.

    The step constants are fitted to the windows of all trials with the same layout, around what physics says of
    it. ``None``: the lengths, the model's config or the hardware are not known.

    Raises:
        InputError: ``spec.lengths`` names a file that cannot be read.
    """
    workload = asked(spec.engine_spec(), spec.workload)
    run = known_run(workload, lengths=spec.lengths, requests=spec.requests)
    capacity, measured = best.capacity, best.measurement
    if run is None or measured is None or capacity is None or capacity.kv_tokens is None or spec.gpus is None:
        return None
    found = known_config(spec.model)
    card, hardware = ModelCard.from_config(found.config, found.name), parse_gpus(spec.gpus)
    same = [r for r in results if all(r.settings.get(name) == best.settings.get(name) for name in LAYOUT)]
    knowledge = learn(card, hardware, same, spec.fixed)
    flags = Settings({**spec.fixed, **best.settings})
    plan = RunPlan(
        requests=run.requests,
        concurrency=measured.concurrency,
        limits=limits_of(knowledge, flags, capacity.kv_tokens, run),
        prompts=run.prompts,
        answers=run.answers,
        engines=capacity.engines,
    )
    if plan.longest > plan.limits.kv_tokens - plan.limits.block_size:
        return None
    return forecast_run(knowledge.model(flags), plan, startup_s=best.startup_s or 0.0).forecast


def _known(workload: WorkloadSpec, lengths: str | None, requests: int | None, scale_sd: float) -> PlannedRun:
    """``scale_sd``: relative error of all answers' lengths together, of a law that is not the run's own."""
    name = workload.law if lengths is None else lengths
    answers: AnswerLengths
    if name in SHIPPED:
        uncut, prompts = shipped_law(name, None)
        answers = KnownLength(uncut=uncut, max_tokens=workload.max_tokens, scale_sd=scale_sd)
    elif lengths is not None:
        seen = parse_lengths(_text(lengths), source=lengths)
        answers = observed_lengths(seen, workload.max_tokens, prior=True)
        prompts = prompt_law(seen) or shipped_law(HLE_LAW, None)[1]
    else:
        prompts, answers = _synthetic(workload, scale_sd)
    usual = REQUESTS if workload.name == "synthetic" and workload.law is None else LAW_REQUESTS
    return PlannedRun(requests=requests or workload.requests or usual, prompts=prompts, answers=answers)


def _synthetic(workload: WorkloadSpec, scale_sd: float) -> tuple[LengthLaw, AnswerLengths]:
    """Prompts and answers as ``workloads.synthetic`` draws them from means and sigma."""
    shortest, longest = (max(1, round(share * workload.mean_prompt_tokens)) for share in PROMPT_SPREAD)
    step = (longest - shortest) / PROMPT_ATOMS
    prompts = law_of([(shortest + (i + 0.5) * step, 1.0) for i in range(PROMPT_ATOMS)], "synthetic")
    uncut = lognormal_law(mean=workload.mean_output_tokens, sigma=workload.sigma, max_tokens=None)
    return prompts, KnownLength(uncut=uncut, max_tokens=workload.max_tokens, scale_sd=scale_sd)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        hint = f"a file of numbers, JSON lines or CSV, or one of the shipped laws: {', '.join(SHIPPED)}"
        raise InputError(f"cannot read lengths from {path}: {error.strerror}", hint=hint) from None
