"""Forecasts from the times of ends alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.evaluation.follow_completions import forecast_completions

MINUTES = [60.0 * (i + 1) for i in range(40)]


def test_a_steady_rate_goes_on() -> None:
    found = forecast_completions(MINUTES[:20], [10.0] * 20, requests=400)
    assert found.elapsed_s == 1200
    assert found.forecast_s == pytest.approx(2400, rel=0.06)
    assert found.low_s < 2400 < found.high_s
    assert not found.done
    assert len(found.limits) == 2


def test_the_interval_is_wide_and_narrows() -> None:
    early = forecast_completions(MINUTES[:4], [10.0] * 4, requests=400)
    late = forecast_completions(MINUTES[:36], [10.0] * 36, requests=400)
    assert (early.high_s - early.low_s) / early.forecast_s > 0.6
    assert (late.high_s - late.low_s) < (early.high_s - early.low_s) / 4


def test_a_rate_that_swings_widens_it() -> None:
    even = forecast_completions(MINUTES[:18], [10.0] * 18, requests=400)
    uneven = forecast_completions(MINUTES[:18], [1.0] * 6 + [28.0] * 6 + [1.0] * 6, requests=400)
    assert uneven.high_s - uneven.low_s > even.high_s - even.low_s


def test_all_have_ended() -> None:
    found = forecast_completions(MINUTES[:12], [10.0] * 10 + [0.0, 0.0], requests=100)
    assert found.done
    assert found.elapsed_s == found.forecast_s == found.low_s == found.high_s == 600


def test_the_first_seconds_only() -> None:
    found = forecast_completions(MINUTES[:10], [10.0] * 10, requests=100, at_s=300)
    assert (found.elapsed_s, found.done) == (300, False)


@pytest.mark.parametrize(
    ("times", "counts", "at_s", "says"),
    [
        ([60, 120], [0, 0], None, "no answer has ended"),
        ([60, 120], [1, 1], 30, "no answer has ended"),
        ([60, 120], [50, 51], None, "more than the 100"),
    ],
)
def test_what_cannot_be(times: list[float], counts: list[float], at_s: float | None, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        forecast_completions(times, counts, requests=100, at_s=at_s)
    assert caught.value.hint


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(lambda c: sum(c) > 0),
    left=st.integers(1, 2000),
)
def test_the_interval_holds_the_middle(counts: list[int], left: int) -> None:
    times = MINUTES[: len(counts)]
    found = forecast_completions(times, [float(c) for c in counts], requests=sum(counts) + left)
    assert found.elapsed_s == times[-1]
    assert found.elapsed_s <= found.low_s <= found.forecast_s <= found.high_s
