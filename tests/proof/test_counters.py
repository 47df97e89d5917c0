from __future__ import annotations

import time

import pytest

from autotune.engines.control import Control
from tests.fakes.null import Null
from tests.proof.counters import CounterReader, passed, since_start


def test_a_number_of_tokens_was_passed_between_two_readings() -> None:
    points = since_start([(10.0, 500), (11.0, None), (12.0, 500), (13.0, 600), (14.0, 800)])
    assert points == [(10.0, 0), (12.0, 0), (13.0, 100), (14.0, 300)]
    assert passed(points, 50) == 12.5
    assert passed(points, 200) == 13.5
    with pytest.raises(AssertionError, match="never reached"):
        passed(points, 301)


def test_the_reader_is_on_the_clock_of_the_client() -> None:
    null = Null()
    try:
        before = time.perf_counter()
        with Control(null.base_url) as control, CounterReader(control) as reader:
            pass
        points = reader.points()
    finally:
        null.close()
    assert points
    assert all(before - 0.1 <= t <= time.perf_counter() + 0.1 for t, _ in points)
