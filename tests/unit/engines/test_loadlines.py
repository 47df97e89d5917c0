from __future__ import annotations

from autotune.engines.loadlines import STAMPS, NewestLines, PeakRate
from autotune.engines.logline import parse
from autotune.engines.statsline import Glance, glance
from tests.unit.engines.server_logs import stats


def seen(stamp: str, rate: float = 1.0, *, engine: int = 0, front: str = "(APIServer pid=1) ") -> Glance:
    (line,) = parse(stats(stamp, rate, engine=engine, front=front))
    found = glance(line, 0)
    assert found is not None
    return found


def rates(newest: NewestLines) -> list[float]:
    return [line.output_tokens_per_s for line in newest.lines]


def test_one_line_an_engine() -> None:
    newest = NewestLines()
    assert newest.lines == []
    for second in (10, 20):
        for engine in (0, 1):
            newest.add(seen(f"10-09 12:00:{second}", second + engine, engine=engine))
    assert rates(newest) == [20, 21]


def test_a_restart_forgets_the_engines_before() -> None:
    newest = NewestLines()
    newest.add(seen("10-09 12:00:10", 1, engine=0))
    newest.add(seen("10-09 12:00:10", 2, engine=1))
    newest.server_started()
    assert rates(newest) == [1, 2]
    newest.add(seen("10-09 12:00:30", 3, engine=0))
    assert rates(newest) == [3]
    newest.server_started()
    newest.add(seen("10-09 12:00:40", 4, engine=1))
    assert rates(newest) == [4]


def test_a_new_process_replaces_one_that_fell_silent() -> None:
    newest = NewestLines()
    newest.add(seen("10-09 12:00:10", 1))
    newest.add(seen("10-09 12:05:00", 2, front="(APIServer pid=2) "))
    assert rates(newest) == [2]


def test_servers_side_by_side_count_together() -> None:
    newest = NewestLines()
    newest.add(seen("10-09 12:00:10", 1))
    newest.add(seen("10-09 12:00:13", 2, front="(APIServer pid=2) "))
    assert rates(newest) == [1, 2]
    slow = NewestLines()
    slow.add(seen("10-09 12:00:10", 1))
    slow.add(seen("10-09 12:05:00", 2, front="(APIServer pid=2) "))
    slow.add(seen("10-09 12:05:01", 3))
    assert sorted(rates(slow)) == [2, 3]


def test_a_hit_rate_printed_apart() -> None:
    newest = NewestLines()
    newest.add_hit_rate(0.5)
    newest.add(seen("10-09 12:00:10"))
    newest.add_hit_rate(0.25)
    assert newest.lines[0].prefix_hit_rate == 0.25
    newest.add(seen("10-09 12:00:20"))
    assert newest.lines[0].prefix_hit_rate == 0.4


def test_the_peak_sums_engines_at_one_time() -> None:
    peak = PeakRate()
    assert peak.value is None
    peak.add(seen("10-09 12:00:10", 5, engine=0))
    peak.add(seen("10-09 12:00:20", 3, engine=0))
    peak.add(seen("10-09 12:00:20", 4, engine=1))
    assert peak.value == 7


def test_the_peak_survives_a_long_log_and_late_engines() -> None:
    peak = PeakRate()
    peak.add(seen("10-09 11:00:00", 50, engine=0))
    peak.add(seen("10-09 11:00:10", 1, engine=0))
    peak.add(seen("10-09 11:00:00", 60, engine=1))
    for second in range(3 * STAMPS):
        peak.add(seen(f"10-09 12:{second // 60:02d}:{second % 60:02d}", 1))
    assert peak.value == 110
    assert len(peak._stamps) == STAMPS


def test_lines_without_time_stand_alone() -> None:
    peak = PeakRate()
    for rate in (2, 5, 3):
        line = seen("10-09 12:00:10", rate)
        peak.add(line._replace(line=line.line._replace(stamp=None)))
    assert peak.value == 5
