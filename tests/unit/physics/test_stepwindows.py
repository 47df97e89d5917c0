from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.physics.stepwindows import window_of, windows_of
from autotune.records.measurement import KvCorrection
from autotune.records.observation import Capacity
from tests.unit.search.results import load

CAPACITY = Capacity(kv_tokens=200_000, engines=2, max_model_len=16_384, max_num_seqs=1024, source="log")
LOAD = load(64, 2000.0, running_mean=62.0, kv_usage_mean=0.5, prompt_tokens_per_s=100.0)


def test_a_load_is_a_window_of_one_engine() -> None:
    window = window_of(LOAD, CAPACITY)
    assert window is not None
    assert (window.batch, window.kv_tokens, window.output_tokens_per_s) == (31, 50_000, 1000)
    assert window.prompt_tokens_per_s == 50
    assert window.weight == pytest.approx((LOAD.window_s or 0) / 10)


def test_a_corrected_load_gives_what_the_counter_showed() -> None:
    correction = KvCorrection(
        factor=1.25,
        factor_sd=0.01,
        window_tokens_per_s=1600.0,
        window_kv_tokens=90_000.0,
        long_run_kv_tokens=80_000.0,
        constants="fitted",
    )
    window = window_of(dataclasses.replace(LOAD, correction=correction, kv_usage_mean=None), CAPACITY)
    assert window is not None
    assert (window.kv_tokens, window.output_tokens_per_s) == (45_000, 800)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"outcome": "saturated"},
        {"valid": False},
        {"kv_usage_mean": None},
        {"running_mean": None},
        {"output_tokens_per_s": None},
        {"preemptions": 3},
    ],
)
def test_a_load_that_tells_nothing_is_left_out(spoilt: dict[str, Any]) -> None:
    assert windows_of([LOAD, dataclasses.replace(LOAD, **spoilt)], CAPACITY) == windows_of([LOAD], CAPACITY)


def test_usage_without_a_capacity_is_no_number_of_tokens() -> None:
    assert windows_of([LOAD], dataclasses.replace(CAPACITY, kv_tokens=None)) == []
