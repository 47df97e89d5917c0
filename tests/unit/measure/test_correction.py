from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest

from autotune.measure.correction import FACTOR_BOUNDS, correct, held_tokens, shape_of, step_model
from autotune.measure.facts import facts_of
from autotune.measure.stationary import LongRun
from autotune.measure.window import Counter, View, Window
from autotune.physics.stepfit import StepWindow
from autotune.physics.steptime import StepModel
from autotune.records.load import Request
from autotune.records.observation import Capacity, Observation, RequestError
from tests.unit.measure.loads import Server as Small
from tests.unit.measure.loads import closed_loop, lognormal, with_samples
from tests.unit.measure.long_runs import Server, long_rate, measured

SMALL = Small(step_s=0.01, per_sequence_s=1e-4, per_kv_token_s=2e-7, kv_tokens=200_000, prompt=100)
CAPACITY = Capacity(kv_tokens=200_000, engines=1, max_model_len=8192, max_num_seqs=256, source="log")
TRUTH = StepModel(t0_s=0.01, sequence_s=1e-4, kv_token_s=2e-7, prefill_token_s=0.0)
N, MEAN = 32, 1_500.0
YOUNG, LATE = (4.0, 14.0), (60.0, 160.0)


@pytest.fixture(scope="module")
def load() -> Observation:
    """A fresh start: its young answers hold less context than those of the long run."""
    return closed_loop(SMALL, lognormal(4000, MEAN, 0.6), n=N, until_s=160)


@pytest.fixture(scope="module")
def requests(load: Observation) -> dict[str, Request]:
    return {
        r.id: Request(id=r.id, prompt=(1,) * 100, prompt_tokens=100, max_tokens=1, forced=True) for r in load.requests
    }


def window(load: Observation, begin: float, end: float) -> tuple[Window, Counter]:
    counter = View(load).counter
    rate = counter.rate(begin, end)
    assert rate is not None
    return Window(start_s=begin, end_s=end, rate=rate, source=counter.source), counter


def run_of(load: Observation) -> LongRun:
    """What the end of a long load held."""
    late = [s for s in load.samples if s.t_s > LATE[0]]
    kv = statistics.fmean(s.kv_usage or 0.0 for s in late) * SMALL.kv_tokens
    return LongRun(batch=N, prompt_tokens=100.0, answer_tokens=MEAN, kv_tokens=kv)


def test_held_tokens_are_those_of_the_cache(load: Observation, requests: dict[str, Request]) -> None:
    times = np.array([s.t_s for s in load.samples[2:]])
    held = held_tokens(load, requests, times, facts_of(load, 1, 160), CAPACITY)
    assert held is not None
    seen = np.array([(s.kv_usage or 0.0) * SMALL.kv_tokens for s in load.samples[2:]])
    # A reading between the end of an answer and the arrival of the next is off by those.
    assert np.median(np.abs(held - seen)) < N
    assert held.mean() == pytest.approx(seen.mean(), rel=0.005)


def test_without_its_own_count_the_usage_stands_in(load: Observation, requests: dict[str, Request]) -> None:
    facts = facts_of(load, 20, 40)
    times = np.array([21.0, 39.0])
    usage = (facts.kv_mean or 0) * 200_000
    failed = dataclasses.replace(load.requests[3], error=RequestError(kind="server", message="500"))
    broken = dataclasses.replace(load, requests=(*load.requests[:3], failed, *load.requests[4:]))
    late = with_samples(load, load.samples[5:])
    for spoilt, known in ((broken, requests), (late, requests), (load, {})):
        assert held_tokens(spoilt, known, times, facts, CAPACITY) == pytest.approx([usage, usage])
    unknown = dataclasses.replace(CAPACITY, kv_tokens=None)
    assert held_tokens(broken, requests, times, facts, unknown) is None


def test_a_young_window_is_corrected_to_the_long_run(load: Observation, requests: dict[str, Request]) -> None:
    run = run_of(load)
    young, counter = window(load, *YOUNG)
    truth = View(load).counter.rate(*LATE)
    assert truth is not None
    assert young.rate.per_s > 1.10 * truth.per_s
    facts = facts_of(load, *YOUNG)
    for prior, tolerance in ((TRUTH.with_sd(t0_s=0.1, sequence_s=0.1, kv_token_s=0.1), 0.01), (None, 0.04)):
        found = correct(load, young, counter, facts, CAPACITY, long_run=run, requests=requests, prior=prior)
        assert found is not None
        assert found.rate.per_s == pytest.approx(truth.per_s, rel=tolerance)
        assert found.record.factor == pytest.approx(found.rate.per_s / young.rate.per_s)
        assert found.record.window_tokens_per_s == young.rate.per_s
        assert found.record.window_kv_tokens < found.record.long_run_kv_tokens
        assert found.record.constants == ("shape" if prior is None else "physics")
        assert found.record.factor_sd > 0
    assert found.record.factor_sd > 0.03  # of what is not known much is uncertain


def test_other_loads_of_the_server_tell_what_a_cached_token_costs(
    load: Observation, requests: dict[str, Request]
) -> None:
    run, (young, counter) = run_of(load), window(load, *YOUNG)
    facts = facts_of(load, *YOUNG)
    others = [
        StepWindow(batch=b, kv_tokens=kv, output_tokens_per_s=TRUTH.rate(b, kv), weight=2.0)
        for b, kv in ((4, 4_000), (16, 15_000), (32, 60_000))
    ]
    found = correct(load, young, counter, facts, CAPACITY, long_run=run, requests=requests, others=others)
    truth = View(load).counter.rate(*LATE)
    assert found is not None
    assert truth is not None
    assert found.rate.per_s == pytest.approx(truth.per_s, rel=0.015)
    assert found.record.constants == "fitted"


def test_what_cannot_be_corrected_is_left(load: Observation, requests: dict[str, Request]) -> None:
    young, counter = window(load, *YOUNG)
    blind = with_samples(load, [dataclasses.replace(s, running=None) for s in load.samples])
    facts = facts_of(blind, *YOUNG)
    assert correct(blind, young, counter, facts, CAPACITY, long_run=run_of(load), requests=requests) is None


def test_the_factor_is_bounded(load: Observation, requests: dict[str, Request]) -> None:
    young, counter = window(load, *YOUNG)
    far = dataclasses.replace(run_of(load), kv_tokens=5e6)
    found = correct(
        load, young, counter, facts_of(load, *YOUNG), CAPACITY, long_run=far, requests=requests, prior=TRUTH
    )
    assert found is not None
    assert found.record.factor == pytest.approx(FACTOR_BOUNDS[0], rel=0.01)


def test_prompts_without_a_counter_count_by_their_mean(load: Observation, requests: dict[str, Request]) -> None:
    young, counter = window(load, *YOUNG)
    silent = with_samples(load, [dataclasses.replace(s, prompt_tokens=None) for s in load.samples])
    facts = facts_of(silent, *YOUNG)
    found = correct(silent, young, counter, facts, CAPACITY, long_run=run_of(load), requests=requests, prior=TRUTH)
    assert found is not None
    assert found.rate.per_s < young.rate.per_s


def test_a_shape_gives_back_the_step_it_was_made_of() -> None:
    seen = StepWindow(batch=50, kv_tokens=100_000, output_tokens_per_s=2_000)
    model = shape_of(seen, 9_000.0)
    assert model.rate(50, 100_000) == pytest.approx(2_000)
    assert model.prefill_token_s == pytest.approx(1 / 9_000)
    assert shape_of(seen, None).prefill_token_s == 0
    assert step_model(None, [], seen, None) == shape_of(seen, None)


@pytest.mark.parametrize("tp", [1, 2])
def test_short_windows_of_a_hidden_server_show_its_long_run(tp: int) -> None:
    """The proof's table in small: two servers, physics 10 % off in every constant, or nothing known at all."""
    for prior in (True, False):
        errors = []
        for seed in (11, 12):
            server = Server(tp=tp, mean=4_000, seed=seed)
            (load,) = measured(
                server, server.known(), concurrencies=[server.concurrency], prior=server.physics if prior else None
            )
            assert load.outcome == "steady", load
            assert load.output_tokens_per_s is not None
            assert load.load_s < 60
            errors.append(load.output_tokens_per_s / long_rate(server, server.concurrency) - 1)
        assert max(map(abs, errors)) < 0.05
        assert abs(statistics.fmean(errors)) < 0.035
