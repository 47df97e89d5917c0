"""Runs whose lengths are known, and forecasts of a trial's settings."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.sim import SimEngine
from autotune.errors import InputError
from autotune.evaluation.predict import forecast_of, known_run, planned_run
from autotune.hub import shipped
from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.gpus import parse_gpus
from autotune.physics.laws import shipped_law
from autotune.physics.model_card import ModelCard
from autotune.physics.simulator import SimRequest
from autotune.planning.ranking import PlannedRun
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult, WorkloadSpec
from autotune.spec import StudySpec
from autotune.workloads import load as load_workload
from tests.unit.search.results import load, result

NAME = "Qwen/Qwen3-32B"
CARD = ModelCard.from_config(shipped()[NAME], NAME)
H200 = parse_gpus("8xH200")
LAW = WorkloadSpec(name="synthetic", law="hle-reasoning")


def planned(workload: WorkloadSpec, fixed: Settings | None = None, **options: Any) -> tuple[Settings, PlannedRun]:
    return planned_run(CARD, H200, fixed or Settings(), workload, **options)


def test_lengths_are_known_of_synthetic_requests_and_of_laws() -> None:
    law = known_run(LAW)
    assert law is not None
    assert law.requests == 2158
    assert law.answers.law.mean == pytest.approx(10_024, rel=0.01)
    assert law.answers.law.cut_share == pytest.approx(0.34, abs=0.01)
    assert known_run(dataclasses.replace(LAW, requests=7)).requests == 7  # type: ignore[union-attr]
    assert known_run(LAW, requests=9).requests == 9  # type: ignore[union-attr]


def test_synthetic_lengths_are_those_that_are_drawn() -> None:
    spec = WorkloadSpec(name="synthetic", mean_output_tokens=900, sigma=0.6, mean_prompt_tokens=400, max_tokens=2000)
    run, drawn = known_run(spec), load_workload(dataclasses.replace(spec, requests=4000)).questions
    assert run is not None
    assert run.requests == 1000
    assert run.answers.law.mean == pytest.approx(sum(q.max_tokens or 0 for q in drawn) / 4000, rel=0.03)
    assert run.prompts.mean == pytest.approx(sum(q.size for q in drawn) / 4000, rel=0.03)


def test_of_real_questions_nothing_is_known_unless_lengths_are_given(tmp_path: Path) -> None:
    assert known_run(WorkloadSpec(name="hle")) is None
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(f'{{"output_tokens": {n}, "prompt_tokens": 50}}\n' for n in (100, 200, 300)))
    run = known_run(WorkloadSpec(name="hle", max_tokens=250), lengths=str(file))
    assert run is not None
    assert run.requests == 2158
    assert run.prompts.mean == 50
    assert run.answers.law.mean == pytest.approx((100 + 200 + 250) / 3)
    bare = tmp_path / "lengths.txt"
    bare.write_text("100\n200\n")
    assert known_run(LAW, lengths=str(bare)).prompts.mean == pytest.approx(300)  # type: ignore[union-attr]
    named = known_run(WorkloadSpec(name="jsonl", path="q"), lengths="hle-reasoning")
    assert named is not None
    with pytest.raises(InputError, match="cannot read lengths"):
        known_run(LAW, lengths=str(tmp_path / "none"))


def test_a_plan_without_lengths_takes_the_law_and_says_how_sure_it_is() -> None:
    flags, run = planned(WorkloadSpec(name="hle"))
    assert flags == Settings(max_model_len=16_384)
    assert run.requests == 2158
    assert run.answers.law.source == "hle-reasoning"
    rng = random.Random(0)
    assert len({round(run.answers.draw(rng).mean) for _ in range(8)}) == 8


def test_a_mean_or_a_file_replaces_the_law(tmp_path: Path) -> None:
    _, run = planned(WorkloadSpec(name="hle"), mean_output=500, requests=40)
    assert run.requests == 40
    assert run.answers.law.mean == pytest.approx(500, rel=0.01)
    file = tmp_path / "l.txt"
    file.write_text("10\n20\n30\n")
    _, run = planned(WorkloadSpec(name="hle"), lengths=str(file))
    assert run.answers.law.mean == pytest.approx(20)
    with pytest.raises(InputError, match="two answers to one question"):
        planned(WorkloadSpec(name="hle"), lengths=str(file), mean_output=3)


def test_a_file_of_questions_gives_their_number_and_rough_prompts(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join('{"prompt": "' + "x" * size + '"}\n' for size in (400, 800, 20_000)))
    flags, run = planned(WorkloadSpec(name="jsonl", path=str(path), max_tokens=2000))
    assert run.requests == 3
    assert run.prompts.tokens == (100.0, 200.0, 5000.0)
    assert flags["max_model_len"] == 7168  # the longest prompt and 2,000, a multiple of 1,024
    assert run.answers.law.source == "hle-reasoning"


def test_answers_are_cut_where_the_context_ends() -> None:
    flags, run = planned(WorkloadSpec(name="hle"), Settings(max_model_len=8192))
    assert flags == Settings(max_model_len=8192)
    limit = run.answers.law.max_tokens
    assert limit is not None
    assert 6000 < limit < 8192
    assert run.answers.law.tokens[-1] == limit
    _, longer = planned(WorkloadSpec(name="hle", max_tokens=100_000))
    assert 38_000 < (longer.answers.law.max_tokens or 0) < 40_960
    with pytest.raises(InputError, match="no room for an answer"):
        planned(WorkloadSpec(name="hle"), Settings(max_model_len=512))


def study(**changes: Any) -> StudySpec:
    return StudySpec(**{"model": NAME, "engine": "sim", "gpus": "8xH200", "requests": 400, **changes})


def measured(spec: StudySpec, settings: Settings) -> TrialResult:
    """A trial with windows as the hidden truth would show them."""
    with SimEngine(spec.engine_spec()).session(settings) as session:
        capacity, truth = session.capacity, SimEngine(spec.engine_spec()).hidden_truth(settings)
    loads = []
    for flight in (8, 40, 80):
        kv = flight * 6160.0
        rate = truth.engines * truth.model.closed_rate(flight, kv, 300, 10_024)
        loads.append(
            load(
                truth.engines * flight,
                rate,
                running_mean=float(truth.engines * flight),
                kv_usage_mean=kv / truth.limits.kv_tokens,
                prompt_tokens_per_s=rate * 300 / 10_024,
            )
        )
    return result(0, 1.0, settings=settings, loads=tuple(loads), best=2, capacity=capacity, startup_s=150.0)


def test_a_forecast_rests_on_the_study_s_own_windows_and_holds_the_truth() -> None:
    settings = Settings(tensor_parallel_size=4, data_parallel_size=2, max_model_len=16_384)
    inside = 0
    for seed in range(4):
        spec = study(seed=seed)
        best = measured(spec, settings)
        told = forecast_of(spec, best, [best])
        assert told is not None
        assert (told.requests, told.startup_s, told.length_source) == (400, 150.0, "hle-reasoning")
        assert told.high_s < 1.35 * told.low_s
        assert not any("t0_s" in limit for limit in told.limits)
        truth = SimEngine(spec.engine_spec()).hidden_truth(settings)
        answers, prompts = shipped_law("hle-reasoning", 14_336)
        rng = random.Random(seed)
        lengths = zip(prompts.sample(400, rng), answers.sample(400, rng), strict=True)
        requests = [SimRequest(id=str(i), prompt_tokens=p, output_tokens=a) for i, (p, a) in enumerate(lengths)]
        done = run_closed_loop(truth.model, truth.limits, requests, 160, engines=2)
        inside += told.low_s <= done.makespan_s <= told.high_s
    assert inside >= 3


def test_only_trials_with_the_same_layout_count() -> None:
    spec = study(seed=1, tilt={"tensor_parallel_size=8": 0.5})
    flags = Settings(tensor_parallel_size=4, data_parallel_size=2, max_model_len=16_384)
    best, other = measured(spec, flags), measured(spec, flags.with_(tensor_parallel_size=8, data_parallel_size=1))
    assert forecast_of(spec, best, [best, other]) == forecast_of(spec, best, [best])


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (study(engine="vllm"), {}),  # real questions: lengths are not known
        (study(engine="vllm", workload=WorkloadSpec(name="synthetic"), gpus=None), {}),
        (study(), {"capacity": None}),
        (study(), {"best": None}),
    ],
)
def test_what_is_not_known_gives_no_forecast(spec: StudySpec, change: dict[str, Any]) -> None:
    best = measured(study(), Settings(max_model_len=16_384))
    changed = dataclasses.replace(best, **change)
    assert forecast_of(spec, changed, [changed]) is None


def test_a_cache_too_small_for_the_longest_request_gives_no_forecast() -> None:
    best = measured(study(), Settings(max_model_len=16_384))
    capacity = dataclasses.replace(best.capacity, kv_tokens=10_000)  # type: ignore[type-var]
    assert forecast_of(study(), dataclasses.replace(best, capacity=capacity), []) is None
