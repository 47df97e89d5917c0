"""The predicted order of settings."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.forecast import RunPlan, simulate_run
from autotune.physics.lengths import KnownLength
from autotune.physics.simulator import SimRequest
from autotune.planning.ranking import Prediction, limits_of, rank, rank_layouts
from autotune.planning.space import layouts
from autotune.records.settings import Settings
from tests.unit.laws import fixed_law
from tests.unit.planning.runs import LENGTH, physics, run


def family(prediction: Prediction) -> tuple[object, object]:
    return prediction.settings["tensor_parallel_size"], prediction.settings["data_parallel_size"]


RANKED = rank_layouts(physics(), run(), LENGTH)


def test_every_layout_is_there_best_first() -> None:
    assert {family(p) for p in RANKED} == {
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)
    }  # fmt: skip
    assert all(a.makespan_s <= b.makespan_s for a, b in itertools.pairwise(RANKED))  # type: ignore[operator]
    assert all(p.fits and p.reason is None and p.settings["max_model_len"] == 16_384 for p in RANKED)
    assert family(RANKED[-1]) == (1, 1)  # one GPU of eight


def test_figures_hang_together() -> None:
    for p in RANKED:
        assert p.engines == p.settings["data_parallel_size"]
        assert p.low_s < p.makespan_s < p.high_s  # type: ignore[operator]
        assert p.concurrency is not None
        assert p.output_tokens_per_s is not None
        # the run cannot be faster than its tokens at the steady rate
        assert p.makespan_s >= 2158 * run().answers.law.mean / p.output_tokens_per_s * 0.98  # type: ignore[operator]


def test_the_makespan_is_what_the_simulator_says() -> None:
    knowledge, planned = physics(), run()
    for p in RANKED[:3]:
        plan = RunPlan(
            requests=planned.requests,
            concurrency=p.concurrency or 1,
            limits=limits_of(knowledge, p.settings, p.kv_capacity_tokens, planned),
            prompts=planned.prompts,
            answers=planned.answers,
            engines=p.engines,
        )
        simulated = simulate_run(plan, knowledge.model(p.settings), planned.answers.law.extended(), hit_share=0.3)
        assert p.makespan_s == pytest.approx(simulated.makespan_s, rel=0.02)
        # on the brink of preemption, not beyond it
        assert simulated.end.preemptions < 0.05 * planned.requests


def test_what_does_not_fit_is_last_with_its_reason() -> None:
    found = rank_layouts(physics("deepseek-ai/DeepSeek-V3"), run(), LENGTH)
    fits = [p.fits for p in found]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    refused = found[-1]
    assert refused.reason is not None
    assert "GiB" in refused.reason
    assert (refused.kv_capacity_tokens, refused.concurrency, refused.makespan_s) == (0, None, None)


def test_a_layout_that_does_not_divide_the_model_is_told() -> None:
    found = rank_layouts(physics(gpus="6xH200"), run(), LENGTH)
    told = {family(p): p.reason for p in found}
    assert "not divisible" in (told[3, 2] or "")
    assert told[2, 3] is None


def test_flags_that_are_fixed_stay() -> None:
    found = rank_layouts(physics(), run(), Settings(tensor_parallel_size=2, max_num_seqs=16, max_model_len=16_384))
    assert {p.settings["tensor_parallel_size"] for p in found} == {2}
    assert {p.settings["max_num_seqs"] for p in found} == {16}
    assert found[0].bottleneck == "sequences"
    assert found[0].concurrency == 64  # of DP 4


def test_more_sequences_are_allowed_where_the_default_would_be_the_limit() -> None:
    # a small model on cards where vLLM's default is 256
    planned = run(max_tokens=2048, prompts=fixed_law(100))
    found = rank_layouts(physics("Qwen/Qwen3-8B", "2xA100"), planned, Settings(max_model_len=4096))
    asked = [p for p in found if "max_num_seqs" in p.settings]
    assert asked
    assert all(p.settings["max_num_seqs"] == 1024 and (p.concurrency or 0) > 256 * p.engines for p in asked)
    plain = rank_layouts(physics("Qwen/Qwen3-8B", "2xA100"), planned, Settings(max_model_len=4096, max_num_seqs=256))
    assert found[0].makespan_s < plain[0].makespan_s  # type: ignore[operator]


def test_expert_parallelism_is_taken_where_only_it_fits() -> None:
    # experts of 1,536 in 8-bit blocks of 128: not divisible by eight, whole experts are
    found = rank_layouts(physics("Qwen/Qwen3-235B-A22B-FP8"), run(), LENGTH)
    told = {family(p): p for p in found}
    assert told[8, 1].fits
    assert told[8, 1].settings["enable_expert_parallel"] is True
    assert "enable_expert_parallel" not in told[4, 1].settings
    off = rank_layouts(physics("Qwen/Qwen3-235B-A22B-FP8"), run(), LENGTH.with_(enable_expert_parallel=False))
    assert not next(p for p in off if family(p) == (8, 1)).fits
    assert len(found) == len(off) == 10


SHORT = {"prompts": fixed_law(10), "answers": KnownLength(uncut=fixed_law(40), max_tokens=40)}
LONG_PROMPTS = {"prompts": fixed_law(12_000), "answers": KnownLength(uncut=fixed_law(60), max_tokens=60)}


@pytest.mark.parametrize(
    ("name", "gpus", "flags", "changes", "limit"),
    [
        ("Qwen/Qwen3-32B", "8xH200", {"tensor_parallel_size": 4}, {}, "kv"),
        ("Qwen/Qwen3-32B", "8xH200", {"tensor_parallel_size": 4, "max_num_seqs": 8}, {}, "sequences"),
        ("Qwen/Qwen3-32B", "8xH200", {"tensor_parallel_size": 8}, {"requests": 40}, "bandwidth"),
        ("Qwen/Qwen3-32B", "8xH200", {"tensor_parallel_size": 8}, {**LONG_PROMPTS, "requests": 60}, "prefill"),
        ("Qwen/Qwen3-4B", "1xL40S", {"max_num_seqs": 2048}, {**SHORT, "requests": 1500}, "compute"),
    ],
)
def test_what_limits_is_named(
    name: str, gpus: str, flags: dict[str, object], changes: dict[str, object], limit: str
) -> None:
    found = rank(physics(name, gpus), [Settings({**LENGTH, **flags})], run(**changes))
    assert found[0].bottleneck == limit


def test_without_draws_there_is_no_interval_and_the_same_order() -> None:
    candidates = [Settings({**LENGTH, **layout}) for layout in layouts(8, {})]
    found = rank(physics(), candidates, run(), draws=0)
    assert [p.settings for p in found] == [p.settings for p in RANKED]
    assert all(p.low_s is None and p.high_s is None for p in found)
    assert rank(physics(), candidates, run(), seed=3) == rank(physics(), candidates, run(), seed=3)


def test_fixed_flags_count_but_are_not_part_of_the_settings() -> None:
    layout = Settings(tensor_parallel_size=4, data_parallel_size=2)
    one = rank(physics(), [layout], run(), fixed=LENGTH, draws=0)[0]
    assert one.settings == layout
    assert one.makespan_s == rank(physics(), [Settings({**LENGTH, **layout})], run(), draws=0)[0].makespan_s


def test_window_layers_hold_more_of_longer_requests() -> None:
    knowledge = physics("google/gemma-3-27b-it")
    flags = Settings(max_model_len=16_384)
    said = knowledge.fit(flags).kv_capacity_tokens
    assert limits_of(knowledge, flags, said, run()).kv_tokens != said
    uniform = physics()
    assert limits_of(uniform, flags, 1000, run()).kv_tokens == 1000


@limits(max_examples=12, deadline=None)
@given(st.integers(1, 4000), st.sampled_from([1, 2, 4, 8]), st.integers(500, 14_000))
def test_more_requests_never_take_less_time(requests: int, tp: int, length: int) -> None:
    answers = KnownLength(uncut=fixed_law(length), max_tokens=14_336)
    candidate = [Settings(tensor_parallel_size=tp, max_model_len=16_384)]
    planned = [run(requests=n, answers=answers) for n in (requests, 2 * requests)]
    one, more = (rank(physics(), candidate, r, draws=0)[0].makespan_s or 0.0 for r in planned)
    assert more >= 0.98 * one
    # nobody is faster than one answer alone
    alone = physics().model(candidate[0]).step_s(1, 0) * length
    assert one >= 0.98 * alone


def test_the_interval_holds_the_truth_of_most_worlds_that_the_physics_allows() -> None:
    """Constants and lengths drawn from what is said to be known of them: 95 % of such worlds are inside."""
    knowledge, planned = physics(), run(requests=600)
    settings = Settings({**LENGTH, "tensor_parallel_size": 4, "data_parallel_size": 2})
    told = rank(knowledge, [settings], planned)[0]
    of_one = limits_of(knowledge, settings, told.kv_capacity_tokens, planned)
    truths = []
    for seed in range(20):
        rng = random.Random(seed)
        model, law = knowledge.model(settings).draw(rng), planned.answers.draw(rng)
        lengths = zip(planned.prompts.sample(600, rng), law.sample(600, rng), strict=True)
        requests = [SimRequest(id=str(i), prompt_tokens=p, output_tokens=a) for i, (p, a) in enumerate(lengths)]
        done = run_closed_loop(model, of_one, requests, told.concurrency or 1, engines=2)
        truths.append(done.makespan_s)
    assert sum(told.low_s <= truth <= told.high_s for truth in truths) >= 17  # type: ignore[operator]
    assert told.high_s < 4 * told.low_s  # type: ignore[operator]
