"""What trials teach about a model on a machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.physics.memory import fits
from autotune.physics.stepstart import from_card
from autotune.physics.steptime import CONSTANTS, StepModel
from autotune.planning.knowledge import Knowledge, learn
from autotune.records.observation import Capacity
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult
from tests.unit.planning.runs import H200, card, physics
from tests.unit.search.results import load, result

TP4 = Settings(tensor_parallel_size=4, max_model_len=16_384)
TRUTH = from_card(card(), H200, TP4).scaled(t0_s=1.2, kv_token_s=0.85, sequence_s=1.1)


def seen(
    truth: StepModel, settings: Settings, *, engines: int = 1, tokens: int = 1_800_000, **changes: Any
) -> TrialResult:
    loads = []
    for concurrency in (8, 64, 128, 200):
        kv = concurrency * 6000
        rate = engines * truth.rate(concurrency, kv, 0.03 * concurrency * 40)
        loads.append(
            load(
                engines * concurrency,
                rate,
                running_mean=float(engines * concurrency),
                kv_usage_mean=kv / tokens,
                prompt_tokens_per_s=engines * 0.03 * concurrency * 40,
                **changes,
            )
        )
    capacity = Capacity(
        kv_tokens=engines * tokens, engines=engines, max_model_len=16_384, max_num_seqs=1024, source="log"
    )
    return result(1, 100.0, settings=settings, loads=tuple(loads), best=3, capacity=capacity)


def worst(model: StepModel, truth: StepModel) -> float:
    points = [(8, 5e4), (64, 4e5), (150, 9e5)]
    return max(abs(model.step_s(b, kv) / truth.step_s(b, kv) - 1) for b, kv in points)


def test_without_trials_it_is_the_physics() -> None:
    knowledge = learn(card(), H200, [])
    assert knowledge == physics()
    assert knowledge.model(TP4) == from_card(card(), H200, TP4)
    assert knowledge.fit(TP4).kv_capacity_tokens == fits(card(), H200, TP4).kv_capacity_tokens


def test_a_trial_that_did_not_say_what_it_holds_teaches_no_steps() -> None:
    silent = dataclasses.replace(seen(TRUTH, TP4), capacity=None)
    assert learn(card(), H200, [silent]).fitted == ()


def test_its_own_windows_give_the_constants() -> None:
    knowledge = learn(card(), H200, [seen(TRUTH, TP4)])
    model = knowledge.model(TP4)
    assert worst(model, TRUTH) < 0.01
    assert worst(from_card(card(), H200, TP4), TRUTH) > 0.05
    assert "t0_s" not in model.guesses
    # flags that do not change the step are the same set-up
    assert knowledge.model(TP4.with_(gpu_memory_utilization=0.8, data_parallel_size=2)) == model
    fewer = knowledge.model(TP4.with_(max_num_seqs=64))
    assert fewer == dataclasses.replace(model, graph_limit=128)


def test_another_set_up_is_carried_over_from_the_nearest() -> None:
    tp2, tp8 = TP4.with_(tensor_parallel_size=2), TP4.with_(tensor_parallel_size=8)
    truths = {s: from_card(card(), H200, s).scaled(t0_s=1.2, kv_token_s=0.85, sequence_s=1.1) for s in (tp2, tp8)}
    knowledge = learn(card(), H200, [seen(TRUTH, TP4), seen(truths[tp8], tp8)])
    assert len(knowledge.fitted) == 2
    assert worst(knowledge.model(tp8), truths[tp8]) < 0.01
    carried = knowledge.model(tp2)
    assert worst(carried, truths[tp2]) < worst(from_card(card(), H200, tp2), truths[tp2])
    assert "kv_token_s" in carried.guesses


def test_fixed_flags_are_part_of_every_trial() -> None:
    eager = {"enforce_eager": True, "quantization": "fp8"}
    truth = from_card(card(), H200, {**TP4, **eager}).scaled(t0_s=1.2)
    knowledge = learn(card(), H200, [seen(truth, TP4)], eager)
    assert worst(knowledge.model({**TP4, **eager}), truth) < 0.01
    assert knowledge.fitted[0].start == from_card(card(), H200, {**TP4, **eager})


def test_launches_correct_the_memory() -> None:
    expected = fits(card(), H200, TP4).kv_capacity_tokens
    trial = dataclasses.replace(
        seen(TRUTH, TP4),
        capacity=Capacity(
            kv_tokens=round(0.97 * expected), engines=1, max_model_len=16_384, max_num_seqs=1024, source="log"
        ),
    )
    knowledge = learn(card(), H200, [trial])
    assert knowledge.fit(TP4).kv_capacity_tokens == pytest.approx(0.97 * expected, rel=0.002)
    other = TP4.with_(tensor_parallel_size=8)
    assert knowledge.fit(other).kv_capacity_tokens < fits(card(), H200, other).kv_capacity_tokens


def test_all_constants_are_named_guesses_before_any_trial() -> None:
    assert set(Knowledge(card=card(), hardware=H200).model(TP4).guesses) == set(CONSTANTS)
