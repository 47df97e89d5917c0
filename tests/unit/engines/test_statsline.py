from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines.logline import parse
from autotune.engines.statsline import Clock, StatsLine, glance, long_before, read_prefix_hit_rate, read_stats
from tests.unit.engines.server_logs import CPU_033, V0_JOURNALD, stats


def read(text: str) -> StatsLine | None:
    (line,) = parse(text)
    seen = glance(line, 0)
    return None if seen is None else read_stats(seen, Clock())


def test_v1() -> None:
    line = read(stats("10-09 12:01:00", 100.5, engine=3))
    assert line == StatsLine(
        t_s=0.0,
        stamp="10-09 12:01:00",
        server=0,
        source="APIServer pid=70",
        engine=3,
        engines=1,
        prompt_tokens_per_s=10.0,
        output_tokens_per_s=100.5,
        running=3,
        waiting=2,
        kv_usage=0.01,
        prefix_hit_rate=0.4,
        preemptions=None,
        swapped=None,
        deferred=None,
        external_prefix_hit_rate=None,
        mm_hit_rate=None,
    )


def test_v0_takes_the_gpu_and_calls_pending_waiting() -> None:
    line = read(V0_JOURNALD.splitlines()[3])
    assert line is not None
    assert (line.kv_usage, line.waiting, line.swapped, line.prefix_hit_rate) == (0.025, 7, 4, None)


def test_every_optional_part() -> None:
    line = read(CPU_033.splitlines()[-2])
    assert line is not None
    assert (line.waiting, line.deferred, line.preemptions, line.kv_usage) == (5, 2, 6, 0.875)
    assert (line.prefix_hit_rate, line.external_prefix_hit_rate, line.mm_hit_rate) == (None, 0.11, 0.22)


@pytest.mark.parametrize("device", ["CPU", "XPU", "NPU", "GPU + host"])
def test_any_device(device: str) -> None:
    line = read(stats("10-09 12:01:00", kv=12.3).replace("GPU KV", f"{device} KV"))
    assert line is not None
    assert line.kv_usage == 0.123


def test_one_hundred_percent_is_one() -> None:
    line = read(stats("10-09 12:01:00", kv=100.0))
    assert line is not None
    assert line.kv_usage == 1.0


def test_without_time() -> None:
    line = read("Engine 000: Avg prompt" + stats("x").partition("Engine 000: Avg prompt")[2])
    assert line is not None
    assert (line.t_s, line.stamp, line.source) == (None, None, "")


@pytest.mark.parametrize(
    "text",
    [
        CPU_033.splitlines()[-1],  # spec decoding
        "INFO 10-09 12:00:00 [x.py:1] Running: 3 reqs, Waiting: 2 reqs",
        f"INFO 10-09 12:00:00 [logger.py:41] Received request c: prompt: '{stats('10-09 12:01:00')}'",
        "INFO 10-09 12:00:00 [loggers.py:9] Engine 000: Iteration(5): 1 context requests, GPU KV cache usage: 1.0%",
        "",
    ],
)
def test_other_lines(text: str) -> None:
    assert read(text) is None


def test_a_line_that_was_cut_does_not_count() -> None:
    whole = stats("10-09 12:01:00", kv=12.5)
    needed = whole.index("12.5%") + len("12.5%")
    for length in range(len(whole) + 1):
        line = read(whole[:length])
        assert (line is not None) == (length >= needed)
        if line is not None:
            assert line.output_tokens_per_s == 100.0
            assert line.prefix_hit_rate in (None, 0.4)


def test_v0_hit_rate_line() -> None:
    assert read_prefix_hit_rate("Prefix cache hit rate: GPU: 12.50%, CPU: 0.00%") == 0.125
    assert read_prefix_hit_rate("Prefix cache hit rate: GPU: -1.00%, CPU: 0.00%") is None
    assert read_prefix_hit_rate("nothing") is None


def elapsed(*stamps: str) -> list[float | None]:
    clock = Clock()
    return [clock.elapsed(stamp) for stamp in stamps]


def test_a_new_year_goes_on() -> None:
    assert elapsed("12-31 23:59:50", "01-01 00:00:00", "01-02 00:00:00") == [0, 10, 86410]
    assert elapsed("12-31 23:59:50", "01-01 00:00:00", "12-31 23:59:50", "01-01 00:00:00")[3] == 365 * 86400 + 10


def test_leap_days() -> None:
    assert elapsed("02-28 23:59:50", "03-01 00:00:00") == [0, 10]
    assert elapsed("02-28 23:59:50", "02-29 00:00:00", "03-01 00:00:00") == [0, 10, 86410]
    assert elapsed("02-29 12:00:00", "12-31 12:00:00", "01-01 12:00:00") == [0, 306 * 86400, 307 * 86400]


def test_two_writers_may_step_back() -> None:
    assert elapsed("10-09 12:00:10", "10-09 12:00:05", "10-09 12:00:20") == [0, -5, 10]
    assert Clock().elapsed(None) is None


def test_which_line_is_long_before() -> None:
    (old,), (new,) = parse(stats("12-31 23:59:50")), parse(stats("01-01 00:00:30"))
    assert long_before(old, new, 30.0)
    assert not long_before(old, new, 60.0)
    assert long_before(old._replace(stamp=None), new, 1e9)


@given(st.integers(0, 10**6), st.integers(0, 99), st.integers(0, 999), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_numbers_come_back(rate: int, running: int, engine: int, kv: int) -> None:
    line = read(stats("10-09 12:01:00", rate / 10, engine=engine, running=running, kv=kv / 10))
    assert line is not None
    assert (line.output_tokens_per_s, line.running, line.engine) == (rate / 10, running, engine)
    assert line.kv_usage == pytest.approx(kv / 1000)
