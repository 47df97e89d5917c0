from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.measure.stationary import (
    BLOCK,
    Prompt,
    StationaryLoad,
    fresh_lengths,
    in_flight,
    long_run,
    shared_share,
    stationary_load,
)
from autotune.physics.laws import lognormal_law
from tests.unit.laws import fixed_law
from tests.unit.measure.long_runs import IDS, prompts

LAW = lognormal_law(mean=4000, sigma=0.8, max_tokens=14_336)


def made(n: int = 50, **changes: Any) -> StationaryLoad:
    arguments: dict[str, Any] = {"concurrency": n, "refill": 200, "seed": 1, "salt": "a", "ids": IDS, **changes}
    return stationary_load(LAW, prompts(), **arguments)


def test_the_answers_in_flight_are_those_of_a_long_run() -> None:
    """Against a closed loop that is left to itself: which answers are met at a random moment, and how old."""
    law = lognormal_law(mean=100, sigma=0.8, max_tokens=358)
    rng = random.Random(3)
    n, met = 64, []
    whole = [law.sample(1, rng)[0] for _ in range(n)]
    left = [rng.randint(1, length) for length in whole]
    for step in range(12_000):
        for i in range(n):
            left[i] -= 1
            if left[i] <= 0:
                whole[i] = left[i] = law.sample(1, rng)[0]
        if step > 1_000 and step % 200 == 0:
            met += [(whole[i], whole[i] - left[i]) for i in range(n)]
    pairs = in_flight(law, 2_000, random.Random(0))
    for part in (0, 1):
        seen, drawn = [m[part] for m in met], [p[part] for p in pairs]
        assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(seen), rel=0.06)
        assert statistics.median(drawn) == pytest.approx(statistics.median(seen), rel=0.12)


@given(n=st.integers(1, 300), seed=st.integers(0, 10_000), mean=st.integers(2, 5_000))
@settings(max_examples=40, deadline=None)
def test_ages_are_below_lengths(n: int, seed: int, mean: int) -> None:
    law = lognormal_law(mean=mean, sigma=0.8, max_tokens=3 * mean)
    pairs = in_flight(law, n, random.Random(seed))
    assert len(pairs) == n
    assert all(0 <= age < length <= 3 * mean for length, age in pairs)


def test_a_stratified_draw_scatters_far_less_than_chance() -> None:
    def held(pairs: list[tuple[int, int]]) -> float:
        return sum(age for _, age in pairs) / len(pairs)

    even = [held(in_flight(LAW, 64, random.Random(i))) for i in range(200)]
    chance = []
    for i in range(200):
        rng = random.Random(i)
        chance.append(held([(1, int(LAW.biased_quantile(rng.random()) * rng.random())) for _ in range(64)]))
    assert statistics.fmean(even) == pytest.approx(LAW.age_mean, rel=0.01)
    assert statistics.stdev(even) < statistics.stdev(chance) / 3


def test_any_stretch_of_fresh_lengths_is_representative_and_mixed() -> None:
    lengths = fresh_lengths(LAW, random.Random(5))
    drawn = [next(lengths) for _ in range(2_000)]
    for begin in range(0, 2_000, 50):
        assert statistics.fmean(drawn[begin : begin + 50]) == pytest.approx(LAW.mean, rel=0.12)
    assert all(a != b for a, b in itertools.pairwise(drawn))


def test_requests_carry_the_answer_so_far_and_force_the_rest() -> None:
    load = made()
    assert len(load.start) == 50
    assert len(load.refill) == 200
    by_id = {p.id: p for p in prompts()}
    for request in load.start:
        assert request.prompt is not None
        assert request.forced
        prompt = by_id[request.id].tokens
        assert request.prompt[: len(prompt)] == prompt
        assert request.prompt_tokens == len(prompt)
        assert len(request.prompt) == len(prompt) + request.context_tokens
    assert all(r.context_tokens == 0 and r.forced and r.prompt == by_id[r.id].tokens for r in load.refill)
    assert sum(r.context_tokens for r in load.start) / 50 == pytest.approx(LAW.age_mean, rel=0.1)
    assert load.kv_tokens == sum(len(r.prompt or ()) for r in load.start)
    assert load.kv_tokens == pytest.approx(load.long_run.kv_tokens, rel=0.1)
    assert len({r.id for r in (*load.start, *load.refill)}) == 250


def test_lengths_depend_on_the_seed_alone_and_text_on_the_load() -> None:
    one, other, reseeded = made(salt="a"), made(salt="b", first=70), made(seed=2)
    lengths = [[(r.max_tokens, r.context_tokens) for r in load.start] for load in (one, other, reseeded)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert [r.max_tokens for r in one.refill] == [r.max_tokens for r in other.refill]
    assert made(salt="a") == one
    assert not {r.id for r in one.start} & {r.id for r in other.start}
    aged = [r for load in (one, other) for r in load.start if r.context_tokens > BLOCK]
    texts = [(r.prompt or ())[r.prompt_tokens :][:BLOCK] for r in aged]
    assert len(set(texts)) == len(texts)
    assert {token for text in texts for token in text} <= set(IDS)


def test_prompts_come_again_with_another_salt_and_id() -> None:
    few = [Prompt(id="a", tokens=(1, 2, 3)), Prompt(id="a#2", tokens=(4, 5))]
    load = stationary_load(fixed_law(10), few, concurrency=3, refill=2, seed=0, salt="s", ids=(7, 8))
    requests = (*load.start, *load.refill)
    assert [r.id for r in requests] == ["a", "a#2", "a##2", "a#2##2", "a##3"]
    assert [r.salt for r in requests] == ["s", "s", "s##2", "s##2", "s##3"]


def test_recorded_answers_are_used_where_they_are_long_enough() -> None:
    recorded = Prompt(id="a", tokens=(1, 2, 3), answer=tuple(range(100, 200)))
    load = stationary_load(fixed_law(90), [recorded], concurrency=5, refill=0, seed=0, salt="s", ids=(7, 8))
    assert all((r.prompt or ())[3:] == recorded.answer[: r.context_tokens] for r in load.start)
    load = stationary_load(fixed_law(900), [recorded], concurrency=9, refill=0, seed=0, salt="s", ids=(7, 8))
    beyond = [r for r in load.start if r.context_tokens > 100]
    assert beyond
    assert all(set((r.prompt or ())[3:]) <= {7, 8} for r in beyond)


def test_what_waits_in_the_server_s_queue_is_fresh() -> None:
    load = made(80, slots=30)
    assert sum(r.context_tokens > 0 for r in load.start[:30]) >= 28
    assert all(r.context_tokens == 0 for r in load.start[30:])
    assert load.long_run == long_run(LAW, load.long_run.prompt_tokens, 30)
    assert made(80, slots=500).long_run.batch == 80


def test_nothing_is_longer_than_the_context() -> None:
    load = made(max_model_len=6_000)
    assert max(len(r.prompt or ()) + r.max_tokens for r in (*load.start, *load.refill)) == 6_000


def test_more_than_the_cache_holds_is_foreseen() -> None:
    load = made()
    assert not load.saturates(None)
    assert not load.saturates(2 * load.kv_tokens)
    assert load.saturates(load.kv_tokens - 1)


def test_without_its_text_a_load_keeps_what_its_judgement_needs() -> None:
    load = made()
    sent = {r.id for r in (*load.start, *load.refill[:10])}
    slim = load.sent(sent)
    assert slim.start[0].prompt == ()
    assert (slim.start[3].context_tokens, slim.start[3].prompt_tokens) == (
        load.start[3].context_tokens,
        load.start[3].prompt_tokens,
    )
    assert (len(slim.start), len(slim.refill)) == (50, 10)
    assert slim.long_run == load.long_run


def test_what_prompts_share_is_counted_in_blocks() -> None:
    system = tuple(range(40))
    alike = [Prompt(id=str(i), tokens=(*system, 100 + i, *range(200, 209))) for i in range(4)]
    assert shared_share(alike) == pytest.approx(32 / 50)
    assert shared_share([*alike, Prompt(id="x", tokens=tuple(range(500, 550)))]) == pytest.approx(0.8 * 32 / 50)
    assert shared_share(alike[:1]) == 0
    assert shared_share([alike[0], alike[0]]) == pytest.approx(48 / 50)


def test_there_must_be_something_to_send() -> None:
    with pytest.raises(ValueError, match="needs prompts"):
        stationary_load(LAW, [], concurrency=1, refill=0, seed=0, salt="s", ids=IDS)
    with pytest.raises(ValueError, match="needs prompts"):
        stationary_load(LAW, prompts(), concurrency=1, refill=0, seed=0, salt="s", ids=())
