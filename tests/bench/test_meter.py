"""The measuring instruments themselves: they are part of what the tables say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.bench import meter
from tests.bench.meter import Point, Run
from tests.bench.vllm_bench import read_result

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_cpu_of_a_tree_holds_children_that_have_ended() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True) as process:
        tree = meter.Tree(process.pid)
        assert process.stdin is not None
        for _ in range(2000):
            if tree.cpu_s() >= 0.25 and tree.processes() == 2:
                break
        used = tree.cpu_s()
        process.stdin.close()
    assert 0.25 <= used <= 2.0
    assert tree.cpu_s() == used


def test_cpu_of_others_is_not_that_of_children_whether_they_live_or_not() -> None:
    others, before = meter.Others(), os.times()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    code = f"{BUSY}print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        seconds = os.times().elapsed - before.elapsed
        cores = others.cores()
        child.stdin.close()
    # All that is left of two cores is at most what others had: our own 0.6 s are not in it.
    assert 0 <= cores <= (os.cpu_count() or 1) - 0.6 / seconds + 0.1


def test_the_load_is_cut_out_of_the_life() -> None:
    points = [Point(0, 5.0, 100, 0), Point(1, 9.0, 100, 0), Point(2, 10.0, 600, 3), Point(3, 11.0, 1100, 0)]
    run = Run(exit_code=0, output="", cpu_s=20.0, processes=1, points=[*points, Point(4, 20.0, 1100, 0)])
    assert (run.load_cpu_s, run.load_s, run.tokens) == (2.0, 2, 1000)
    assert run.cpu_s_per_million == pytest.approx(2000.0)
    with pytest.raises(AssertionError, match="sent nothing"):
        _ = Run(exit_code=1, output="no", cpu_s=1.0, processes=1, points=points[:2]).tokens


def test_in_flight_is_weighed_by_time_between_ramp_and_last_arrival() -> None:
    # Ten from second 1 on; one short for 2 of the 8 s that count; the drain does not count.
    changes = [(0.0, 1), (1.0, 10), (4.0, 9), (6.0, 10), (8.0, 9), (9.0, 10), (9.5, 5), (12.0, 0)]
    held = meter.in_flight(changes, 10, ramp_s=1.0)
    assert held.mean_error == pytest.approx(0.1 * 3 / 8)
    assert (held.fewest, held.most) == (9, 10)
    over = meter.in_flight([(0.0, 10), (1.0, 12), (3.0, 9), (5.0, 10)], 10, ramp_s=1.0)
    assert over.mean_error == pytest.approx((0.2 * 2 + 0.1 * 2) / 4)
    assert over.most == 12


def test_tokens_of_a_result_are_put_in_the_order_in_which_they_came() -> None:
    result = read_result(
        {
            "completed": 2,
            "failed": 0,
            "duration": 4.0,
            "total_output_tokens": 5,
            "start_times": [10.0, 10.5],
            "ttfts": [1.0, 0.25],
            "itls": [[1.0], [0.5]],
            "output_lens": [2, 3],
            "input_lens": [7, 8],
        }
    )
    assert result.token_times == [(10.75, 1.5), (11.0, 2.5), (11.25, 4.0), (12.0, 5.0)]
    assert result.output_tokens_per_s == 1.25
    assert (result.lengths, result.prompt_tokens) == ([2, 3], 15)
