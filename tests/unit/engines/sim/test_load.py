"""One closed loop in virtual time."""

from __future__ import annotations

import itertools
import time

import pytest

from autotune.engines.sim import SimWorld
from autotune.records.event import Event
from autotune.records.load import LoadPlan, Message, Request
from autotune.records.observation import Observation
from autotune.records.settings import Settings
from tests.unit.engines.sim.machines import after, engine, never, plan, request
from tests.unit.laws import fixed_law

SETTINGS = Settings(tensor_parallel_size=2, max_model_len=16_384)


def observed(load: LoadPlan, stop: object = never, settings: Settings = SETTINGS, **changes: object) -> Observation:
    world = changes.pop("world", SimWorld(1))
    with engine(world, **changes).session(settings) as session:
        return session.observe(load, stop=stop)


def test_samples_are_a_second_apart_and_counters_only_rise() -> None:
    seen = observed(plan(16, 2000), after(30.0))
    times = [s.t_s for s in seen.samples]
    assert times == [float(i) for i in range(31)]
    for name in ("generation_tokens", "prompt_tokens", "preemptions", "prefix_queries", "prefix_hits"):
        values = [getattr(s, name) for s in seen.samples]
        assert all(a <= b for a, b in itertools.pairwise(values))
    assert seen.end == "stopped:long enough"
    assert seen.client.cpu_s == 0.0
    assert [s.t_s for s in observed(plan(4, 60, sample_s=0.5), after(2.0)).samples] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_the_rate_is_the_model_s() -> None:
    made = engine(SimWorld(1))
    truth = made.hidden_truth(SETTINGS)
    with made.session(SETTINGS) as session:
        seen = session.observe(plan(32, 5000, tokens=400), stop=after(60.0))
    first, last = seen.samples[20], seen.samples[-1]
    rate = ((last.generation_tokens or 0) - (first.generation_tokens or 0)) / 40.0
    expected = truth.model.closed_rate(32, 32 * (100 + 212), 100, 424)
    assert rate == pytest.approx(expected, rel=0.05)


def test_the_same_load_gives_the_same_observation_and_another_load_other_noise() -> None:
    assert observed(plan(8, 100)) == observed(plan(8, 100))
    assert observed(plan(8, 100), world=SimWorld(2)) != observed(plan(8, 100))
    with engine(SimWorld(1)).session(SETTINGS) as session:
        one, two = (session.observe(plan(8, 100), stop=never).t_s for _ in range(2))
    assert one != two
    assert one == pytest.approx(two, rel=0.1)


def test_a_full_cache_preempts_and_finds_part_of_it_again() -> None:
    tight = SETTINGS.with_(num_gpu_blocks_override=1100)
    world = next(w for w in map(SimWorld, range(50)) if engine(w).hidden_truth(tight).limits.hit_share > 0.3)
    long = LoadPlan(start=tuple(request(f"r{i}", 4000) for i in range(16)))
    seen = observed(long, after(300.0), tight, world=world)
    last = seen.samples[-1]
    assert max(s.kv_usage or 0.0 for s in seen.samples) > 0.95
    assert max(s.waiting or 0 for s in seen.samples) > 0
    assert (last.preemptions or 0) > 0
    assert 0 < (last.prefix_hits or 0) < (last.prefix_queries or 0)


def test_sequences_beyond_the_limit_wait() -> None:
    seen = observed(plan(12, 500), after(20.0), SETTINGS.with_(max_num_seqs=8))
    middle = seen.samples[10]
    assert (middle.running, middle.waiting) == (8, 4)


def test_a_forced_answer_has_its_length_and_a_free_one_that_of_the_law() -> None:
    free = tuple(request(f"q{i}", tokens, forced=False) for i, tokens in enumerate((400, 700)))
    seen = observed(LoadPlan(start=(request("forced", 333), *free)), law=fixed_law(500))
    told = {r.id: (r.output_tokens, r.finish_reason, r.prompt_tokens) for r in seen.requests}
    assert told == {"forced": (333, "length", 100), "q0": (400, "length", 100), "q1": (500, "stop", 100)}


def test_free_lengths_belong_to_the_question_under_every_setting() -> None:
    free = LoadPlan(start=tuple(request(f"q{i}", 14_336, forced=False) for i in range(24)))
    one = observed(free)
    other = observed(free, never, SETTINGS.with_(tensor_parallel_size=8))
    lengths = [{r.id: r.output_tokens for r in seen.requests} for seen in (one, other)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0].values())) > 10
    assert {r.finish_reason for r in one.requests} == {"stop", "length"}


def test_an_answer_under_way_has_the_rest_left() -> None:
    rest = request("q", 14_336, prompt=300, forced=False, context_tokens=200)
    assert observed(LoadPlan(start=(rest,)), law=fixed_law(500)).requests[0].output_tokens == 300
    done = request("q", 14_336, prompt=700, forced=False, context_tokens=600)
    assert observed(LoadPlan(start=(done,)), law=fixed_law(500)).requests[0].output_tokens == 1


def test_chat_messages_count_about_four_characters_a_token() -> None:
    chat = Request(id="c", messages=(Message(role="user", content="x" * 400),), max_tokens=10, forced=True)
    counted = Request(id="d", messages=chat.messages, prompt_tokens=77, max_tokens=10, forced=True)
    seen = observed(LoadPlan(start=(chat, counted)))
    assert [r.prompt_tokens for r in seen.requests] == [105, 77]


def test_an_answer_ends_where_the_context_does() -> None:
    seen = observed(LoadPlan(start=(request("r", 5000, prompt=900),)), never, SETTINGS.with_(max_model_len=1000))
    assert (seen.requests[0].output_tokens, seen.requests[0].finish_reason) == (100, "length")


def test_a_first_request_that_is_refused_ends_the_load() -> None:
    long = request("long", 10, prompt=2000)
    short = SETTINGS.with_(max_model_len=1000)
    seen = observed(LoadPlan(start=(long, request("r", 10))), never, short)
    assert seen.end == "stopped:client_error"
    assert seen.failure is not None
    assert "1000" in seen.failure.line


def test_a_later_one_is_an_error_and_the_next_takes_its_place() -> None:
    refill = (request("long", 10, prompt=2000), request("last", 10))
    seen = observed(LoadPlan(start=(request("r", 10),), refill=refill), never, SETTINGS.with_(max_model_len=1000))
    assert seen.end == "drained"
    assert [r.id for r in seen.requests] == ["r", "long", "last"]
    assert seen.requests[1].error is not None
    assert seen.requests[1].error.kind == "client"
    assert seen.requests[2].output_tokens == 10


def test_what_takes_too_long_is_given_up_and_replaced() -> None:
    load = LoadPlan(start=(request("slow", 5000), request("r", 50)), refill=(request("next", 20),), request_limit_s=5.0)
    seen = observed(load)
    assert seen.end == "drained"
    slow = next(r for r in seen.requests if r.id == "slow")
    assert slow.error is not None
    assert slow.error.kind == "timeout"
    assert slow.ended_s == pytest.approx(5.0, abs=1.0)
    assert {r.id for r in seen.requests if r.error is None} == {"r", "next"}


def test_a_long_load_asks_its_stop_rule_seldom_but_reads_each_second() -> None:
    asked: list[float] = []

    def stop(so_far: Observation) -> str | None:
        asked.append(so_far.t_s)
        assert so_far.end == "running"
        return "done" if so_far.t_s >= 900 else None

    seen = observed(plan(8, 4000, tokens=3000), stop)
    assert asked[:60] == [float(i) for i in range(1, 61)]
    assert len(asked) < 250
    assert all(b - a <= 1.0 + 0.02 * b for a, b in itertools.pairwise(asked))
    assert len(seen.samples) == round(seen.t_s) + 1


def test_progress_is_told_now_and_then() -> None:
    told: list[Event] = []
    observed(plan(4, 400), after(90.0), emit=told.append)
    kinds = [e.kind for e in told]
    assert (kinds[0], kinds[1], kinds[-1]) == ("server_starting", "server_ready", "server_stopped")
    shown = [e.data for e in told if e.kind == "load_sampled"]
    assert [d["t_s"] for d in shown] == [30.0, 60.0, 90.0]
    assert float(str(shown[-1]["output_tokens_per_s"])) > 0
    assert shown[-1]["in_flight"] == 4


def test_real_time_takes_real_seconds() -> None:
    told: list[Event] = []
    began = time.monotonic()
    observed(plan(4, 400), after(10.0), real_time=0.001, emit=told.append)
    # a start of about 130 s, ten of load, five of stop
    assert time.monotonic() - began > 0.1
    assert sum(e.kind == "load_sampled" for e in told) == 10
