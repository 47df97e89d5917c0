from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from autotune.measure import rate as module
from autotune.measure.rate import rate_of


def read(rates: list[float], step: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(rates) + 1) * step, np.cumsum([0.0, *rates]) * step


def test_the_quantile_of_t_is_scipys() -> None:
    for freedom in (*range(module.FEWEST_BATCHES - 1, module.MOST_BATCHES), 33.3, 1e6):
        assert module.t975(freedom) == pytest.approx(student.ppf(0.975, freedom), rel=3e-4)


def test_a_constant_rate_is_exact_and_has_no_width() -> None:
    rate = rate_of(*read([100.0] * 20))
    assert rate is not None
    assert (rate.per_s, rate.half_width, rate.change) == (pytest.approx(100), pytest.approx(0, abs=1e-9), 0)


def test_a_gap_and_an_uneven_pace_change_nothing() -> None:
    times = np.array([0.0, 1, 2.5, 3, 4, 9, 10, 11, 12.2, 13, 14, 15])
    rate = rate_of(times, times * 70)
    assert rate is not None
    assert rate.per_s == pytest.approx(70)
    assert rate.half_width == pytest.approx(0, abs=1e-9)


def test_too_few_readings_give_no_interval_and_one_gives_nothing() -> None:
    assert rate_of(np.array([1.0]), np.array([5.0])) is None
    assert rate_of(np.array([1.0, 1.0]), np.array([5.0, 6.0])) is None
    rate = rate_of(*read([10.0] * 7))
    assert rate is not None
    assert rate.half_width is None
    assert rate.change_noise is None


def test_a_fall_is_a_change_that_chance_does_not_explain() -> None:
    rate = rate_of(*read([200.0 - 5 * i for i in range(20)]))
    assert rate is not None
    assert rate.change == pytest.approx(-50 / 177.5, rel=0.01)
    assert rate.change_noise is not None
    assert rate.change_noise < 0.01
    assert rate.half_width is not None
    assert rate.half_width > 20


def test_change_from_and_to_nothing() -> None:
    rising, idle = rate_of(*read([0.0] * 10 + [5.0] * 10)), rate_of(*read([0.0] * 20))
    assert rising is not None
    assert rising.change == math.inf
    assert idle is not None
    assert (idle.change, idle.change_noise) == (0.0, None)


def test_the_interval_covers_independent_noise() -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        rate = rate_of(*read(list(rng.normal(100, 10, 20))))
        assert rate is not None
        assert rate.half_width is not None
        inside += abs(rate.per_s - 100) <= rate.half_width
    assert 0.91 <= inside / 400 <= 0.98


def test_a_counter_that_moves_in_steps_has_a_narrower_interval() -> None:
    rng = np.random.default_rng(5)
    steps = np.cumsum(rng.normal(0.27, 0.01, 120))
    times = np.arange(21.0)
    stepped = rate_of(times, np.searchsorted(steps, times) * 27.0)
    assert stepped is not None
    assert stepped.per_s == pytest.approx(100, rel=0.03)
    batches = module._batch_rates(times, np.searchsorted(steps, times) * 27.0, 10)
    plain = 2.2622 * float(np.std(batches, ddof=1)) / math.sqrt(10)
    assert (stepped.half_width or 1) < plain


def test_correlated_noise_widens_the_interval() -> None:
    slow = [100.0 + 10 * (i // 5 % 2) for i in range(20)]
    quick = [100.0 + 10 * (i // 2 % 2) for i in range(20)]
    wide, narrow = rate_of(*read(slow)), rate_of(*read(quick))
    assert wide is not None
    assert narrow is not None
    assert (wide.half_width or 0) > 1.2 * (narrow.half_width or 0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_the_rate_is_between_the_smallest_and_the_largest(rates: list[float], step: float) -> None:
    rate = rate_of(*read(rates, step))
    assert rate is not None
    assert min(rates) * 0.999 - 1e-6 <= rate.per_s <= max(rates) * 1.001 + 1e-6
    assert rate.half_width is None or rate.half_width >= 0
