"""Which readings of a source are the run, and when it began and ended."""

from __future__ import annotations

import pytest

from autotune.evaluation.follow_series import Reading, RunSeries, run_stretch


def line(t_s: float, running: float, tokens: float | None = None, waiting: float = 0.0) -> Reading:
    written = 100.0 * running if tokens is None else tokens
    return Reading(t_s=t_s, span_s=10.0, output_tokens=written, running=running, waiting=waiting)


def lines(start: float, *running: float) -> list[Reading]:
    return [line(start + 10 * i, r) for i, r in enumerate(running)]


def series(*readings: Reading, starts: tuple[float, ...] = ()) -> RunSeries:
    return RunSeries(readings=readings, source="log", life_starts=starts)


def test_nothing_in_flight_is_no_run() -> None:
    assert run_stretch(series()) is None
    assert run_stretch(series(*lines(0, 0, 0, 0))) is None


def test_idle_lines_before_are_left_out() -> None:
    found = run_stretch(series(*lines(0, 0, 0, 0), *lines(30, 50, 50, 40)))
    assert found is not None
    assert [r.t_s for r in found.readings] == [10, 20, 30]
    assert (found.elapsed_s, found.ended, found.notes) == (30, False, ())


def test_a_line_of_zero_ends_the_run() -> None:
    found = run_stretch(series(*lines(0, 50, 30), line(20, 0, tokens=900.0), *lines(30, 0, 0)))
    assert found is not None
    assert (found.ended, found.elapsed_s) == (True, 30)


def test_the_line_that_ends_it_may_be_idle_or_missing() -> None:
    idle = run_stretch(series(*lines(0, 50, 30), line(20, 0, tokens=0.0)))
    later = run_stretch(series(*lines(0, 50, 30, 20), line(900, 1)))
    for found, last in ((idle, 20), (later, 30)):
        assert found is not None
        assert found.ended
        assert last < found.elapsed_s <= last + 10


def test_the_last_large_stretch_counts_and_warm_up_does_not() -> None:
    found = run_stretch(series(*lines(0, 60, 60, 0, 0), *lines(400, 1, 2, 64, 64)))
    assert found is not None
    assert [r.running for r in found.readings] == [64, 64]
    assert found.readings[0].t_s == 10
    assert found.notes == ("earlier load in the same source is left out",)


def test_a_small_stretch_afterwards_is_not_the_run() -> None:
    found = run_stretch(series(*lines(0, 60, 60, 60, 0), *lines(400, 1, 1)))
    assert found is not None
    assert max(r.running for r in found.readings) == 60
    assert found.ended


def test_batches_close_together_are_one_run_and_far_apart_are_two() -> None:
    close = run_stretch(series(*lines(0, 60, 40, 0), *lines(30, 60, 60)))
    far = run_stretch(series(*lines(0, 60, 40, 0), *lines(300, 60, 60)))
    assert close is not None
    assert far is not None
    assert (close.elapsed_s, far.elapsed_s) == (50, 20)


def test_another_server_begins_another_run() -> None:
    both = series(*lines(0, 60, 60), *lines(20, 60, 60, 60), starts=(20.0,))
    found = run_stretch(both)
    assert found is not None
    assert [r.t_s for r in found.readings] == [10, 20, 30]
    assert not found.restarted


def test_a_restart_after_it_is_told() -> None:
    found = run_stretch(series(*lines(0, 60, 60), *lines(40, 0, 0), starts=(40.0,)))
    assert found is not None
    assert (found.restarted, found.ended, found.elapsed_s) == (True, False, 20)


@pytest.mark.parametrize(("at_s", "elapsed", "ended"), [(20, 20, False), (25, 20, False), (1000, 40, True)])
def test_only_the_first_seconds(at_s: float, elapsed: float, ended: bool) -> None:
    found = run_stretch(series(*lines(0, 50, 50, 40, 0)), at_s)
    assert found is not None
    if ended:
        assert (found.ended, found.elapsed_s > 30) == (True, True)
    else:
        assert (found.elapsed_s, found.ended) == (elapsed, False)


def test_before_the_first_line_nothing_is_seen() -> None:
    assert run_stretch(series(*lines(0, 50, 50)), 3) is None


def test_one_line_is_a_run_too() -> None:
    found = run_stretch(series(line(5, 50)))
    assert found is not None
    assert (found.elapsed_s, found.ended) == (10, False)
