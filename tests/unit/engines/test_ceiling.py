from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines import ceiling
from autotune.engines.ceiling import Ceiling, Try, client_ceiling

CPU_LIMIT, LAG_LIMIT_S = 0.8, 0.05


@contextmanager
def no_server() -> Iterator[str]:
    yield "http://127.0.0.1:1"


def on_a_host(monkeypatch: pytest.MonkeyPatch, cpu_s_per_token: float, *, late_from: float = 1e9) -> Ceiling:
    """A client that needs so much CPU, whose loop is late from a rate on."""

    def streamed(url: str, rate: float) -> Try:
        lag_s = 0.2 if rate >= late_from else 0.01
        return Try(tokens_per_s=rate, cpu_share=rate * cpu_s_per_token, loop_lag_s=lag_s)

    with monkeypatch.context() as patch:
        patch.setattr(ceiling.nullserver, "started", no_server)
        patch.setattr(ceiling, "_streamed", streamed)
        patch.setattr(ceiling, "_whole", lambda url: 1000.0)
        return client_ceiling(cpu_limit=CPU_LIMIT, lag_limit_s=LAG_LIMIT_S)


@given(cpu_us=st.floats(5, 190))
@settings(max_examples=50, deadline=None)
def test_the_ceiling_is_where_the_cpu_meets_its_limit(cpu_us: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = on_a_host(patch, cpu_us / 1e6)
    truth = CPU_LIMIT / (cpu_us / 1e6)
    assert found.tokens_per_s is not None
    assert 0.94 * truth <= found.tokens_per_s <= truth
    assert found.cpu_s_per_million_tokens == pytest.approx(cpu_us)


@pytest.mark.parametrize("late_from", [6_000.0, 10_000.0, 20_000.0, 30_000.0])
def test_a_late_loop_is_a_limit_too(monkeypatch: pytest.MonkeyPatch, late_from: float) -> None:
    found = on_a_host(monkeypatch, 20e-6, late_from=late_from)
    assert found.tokens_per_s is not None
    assert late_from / 2.1 <= found.tokens_per_s < late_from
    assert found.loop_lag_s == 0.01


def test_a_slow_host_is_tried_at_lower_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_a_host(monkeypatch, 500e-6)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s == pytest.approx(0.95 * CPU_LIMIT / 500e-6)


def test_a_host_on_which_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_a_host(monkeypatch, 20e-6, late_from=1.0)
    assert found.tokens_per_s is None
    assert found.loop_lag_s == 0.2
    assert found.whole_answers_per_s == 1000.0


def test_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # Short, over real sockets; the limits are such that even a busy host holds the first rate.
    for name, value in {"STREAMS": 8, "FIRST_RATE": 400.0, "TRIES": 1, "SETTLE_S": 0.2, "SPAN_S": 0.5}.items():
        monkeypatch.setattr(ceiling, name, value)
    found = client_ceiling(cpu_limit=1.0, lag_limit_s=10.0)
    assert found.streams == 8
    assert found.tokens_per_s is not None
    assert 0 < found.tokens_per_s < 1000
    assert found.cpu_s_per_million_tokens > 0
    assert found.whole_answers_per_s > 0
