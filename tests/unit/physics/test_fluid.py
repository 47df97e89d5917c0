import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.fluid import CELLS, GENERATIONS, FluidRun, fluid_run, loop_shape
from autotune.physics.laws import LengthLaw, law_of, lognormal_law
from autotune.physics.simulator import EngineLimits
from autotune.physics.steptime import StepModel

MODEL = StepModel(t0_s=0.0127, sequence_s=2.4e-5, kv_token_s=3.3e-8, prefill_token_s=5e-5)
CONSTANT = StepModel(t0_s=0.01, sequence_s=0.0, kv_token_s=0.0, prefill_token_s=0.0)
LAW = lognormal_law(mean=3000, sigma=0.7, max_tokens=8192)
FIXED = law_of([(800.0, 1.0)], "fixed")
ROOM = EngineLimits(kv_tokens=10_000_000)


def run(
    *,
    requests: float,
    concurrency: float,
    model: StepModel = MODEL,
    law: LengthLaw = LAW,
    limits: EngineLimits = ROOM,
    engines: int = 1,
) -> FluidRun:
    return fluid_run(
        model, limits, loop_shape(law), prompt_tokens=300, requests=requests, concurrency=concurrency, engines=engines
    )


def test_equal_answers_start_in_generations() -> None:
    shape = loop_shape(FIXED)
    begun = np.flatnonzero(shape.starts > 1e-9)
    assert list(begun) == [CELLS * i for i in range(GENERATIONS)]
    assert shape.starts[begun] == pytest.approx(1.0)
    assert shape.ages[CELLS // 2] == pytest.approx(400, rel=0.02)


def test_a_loop_becomes_stationary() -> None:
    shape = loop_shape(LAW)
    # Renewal theorem: one start for each mean length of the clock, ages of E[L^2] / (2 E[L]).
    assert shape.starts[-CELLS:].mean() * LAW.mean == pytest.approx(shape.cell, rel=0.01)
    assert shape.ages[-1] == pytest.approx(LAW.age_mean, rel=0.02)
    assert shape.survival[0] == pytest.approx(1.0)
    assert shape.survival[-1] == pytest.approx(0.0, abs=1e-9)
    assert (np.diff(shape.survival) <= 1e-12).all()


def test_a_law_is_worked_out_once() -> None:
    assert loop_shape(LAW) is loop_shape(lognormal_law(mean=3000, sigma=0.7, max_tokens=8192))


def test_equal_answers_one_after_the_other() -> None:
    # A step always takes 10 ms: rounds of 800 tokens take 8 s each.
    for rounds in (1, 2, 3):
        found = run(requests=10 * rounds, concurrency=10, model=CONSTANT, law=FIXED)
        assert found.makespan_s == pytest.approx(8.0 * rounds, rel=0.02)
    assert found.output_tokens_per_s == pytest.approx(10 / 0.01)
    assert found.tail_s == pytest.approx(8.0, rel=0.02)


def test_prompts_cost_their_time() -> None:
    slow = StepModel(t0_s=0.01, sequence_s=0.0, kv_token_s=0.0, prefill_token_s=1e-4)
    free, paid = (run(requests=100, concurrency=10, model=m, law=FIXED) for m in (CONSTANT, slow))
    # Less what ends with the last starts: 100 prompts of 300 tokens at 0.1 ms.
    assert paid.makespan_s - free.makespan_s == pytest.approx(100 * 300 * 1e-4, rel=0.15)


def test_engines_side_by_side_are_as_fast_as_one_alone() -> None:
    one = run(requests=600, concurrency=60)
    four = run(requests=2400, concurrency=240, engines=4)
    assert four.output_tokens_per_s == pytest.approx(4 * one.output_tokens_per_s)
    assert four.kv_usage == pytest.approx(one.kv_usage)
    assert one.makespan_s <= four.makespan_s <= 1.05 * one.makespan_s  # the last of four ends later


def test_a_long_run_is_paid_by_the_steady_rate() -> None:
    short, long = (run(requests=n, concurrency=50) for n in (5000, 9000))
    more_s = 4000 * LAW.mean / short.output_tokens_per_s
    assert long.makespan_s - short.makespan_s == pytest.approx(more_s, rel=0.01)
    assert long.tail_s == pytest.approx(short.tail_s)


def test_prefix_cache_hits_help_a_full_cache_only() -> None:
    def makespan(kv: int, hit: float) -> float:
        limits = EngineLimits(kv_tokens=kv, hit_share=hit)
        return run(requests=600, concurrency=120, limits=limits).makespan_s

    assert makespan(100_000, 0.8) < makespan(100_000, 0.0)
    assert makespan(5_000_000, 0.8) == makespan(5_000_000, 0.0)


sizes = st.integers(1, 3000)


@given(
    rounds=st.floats(1.0, 30.0),
    flight=st.integers(16, 200),
    kv=st.integers(20_000, 2_000_000),
    engines=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_no_run_is_faster_than_its_engines(rounds: float, flight: int, kv: int, engines: int) -> None:
    # A fluid means many in flight: with one or two the last end is told too early.
    requests, concurrency = rounds * flight * engines, flight * engines
    limits = EngineLimits(kv_tokens=kv)
    found = run(requests=requests, concurrency=concurrency, limits=limits, engines=engines)
    roofline = engines * flight / MODEL.base_s(flight)
    assert found.makespan_s >= 0.98 * requests * LAW.mean / roofline
    assert 0 < found.tail_s <= found.makespan_s
    assert found.output_tokens_per_s <= roofline
    assert found.kv_usage > 0


@given(requests=sizes, concurrency=st.integers(1, 400), kv=st.integers(20_000, 1_000_000), more=st.floats(1.01, 5.0))
@settings(max_examples=40, deadline=None)
def test_more_cache_is_never_much_slower(requests: int, concurrency: int, kv: int, more: float) -> None:
    small, large = (
        run(requests=requests, concurrency=concurrency, limits=EngineLimits(kv_tokens=k)) for k in (kv, int(kv * more))
    )
    assert large.makespan_s <= 1.02 * small.makespan_s


@given(requests=sizes, concurrency=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_more_requests_take_longer(requests: int, concurrency: int) -> None:
    less, more = (run(requests=n, concurrency=concurrency) for n in (requests, 2 * requests + 20))
    assert more.makespan_s > less.makespan_s
