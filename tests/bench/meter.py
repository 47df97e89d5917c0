"""Measures a load generator from outside: CPU of its processes from /proc, requests in flight from the server."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autotune.engines.control import Control
from autotune.engines.scrape import parse

PACE_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tree:
    """CPU of a process and of all that descend from it, those that have ended included."""

    def __init__(self, pid: int) -> None:
        self._members = {pid}
        self._session = pid
        self._ticks: dict[int, int] = {}

    def cpu_s(self) -> float:
        """Seconds so far; a process that ends between two calls loses what it used since the last one."""
        stats = _stats()
        _add_descendants(self._members, stats)
        self._members |= {pid for pid, fields in stats.items() if int(fields[3]) == self._session}
        for pid in self._members & stats.keys():
            self._ticks[pid] = max(self._ticks.get(pid, 0), sum(map(int, stats[pid][11:13])))
        return sum(self._ticks.values()) / TICKS_PER_S

    def processes(self) -> int:
        """How many there were."""
        return len(self._ticks)


class Others:
    """CPU that this machine gave to anybody but this process and its descendants, hypervisor included."""

    def __init__(self) -> None:
        self._last = self._read()

    def cores(self) -> float:
        """Mean number of cores since the last call (or the start)."""
        before, self._last = self._last, self._read()
        seconds, all_s, own_s = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, (all_s - own_s) / seconds)

    def _read(self) -> tuple[float, float, float]:
        # proc(5): cpu user nice system idle iowait irq softirq steal
        user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
        busy = sum(map(int, (user, nice, system, irq, softirq, steal)))
        stats = _stats()
        family = {os.getpid()}
        _add_descendants(family, stats)
        # Its own time, and that of the children it has waited for.
        own = sum(int(ticks) for pid in family & stats.keys() for ticks in stats[pid][11:15])
        return time.monotonic(), busy / TICKS_PER_S, own / TICKS_PER_S


def _stats() -> dict[int, list[str]]:
    """Fields of ``/proc/PID/stat`` from the state on (proc(5): state is [0], parent [1], session [3])."""
    stats = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                stats[int(place.name)] = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    return stats


def _add_descendants(members: set[int], stats: dict[int, list[str]]) -> None:
    while new := {pid for pid, fields in stats.items() if int(fields[1]) in members} - members:
        members |= new


class Point(NamedTuple):
    """One reading."""

    t_s: float
    cpu_s: float
    tokens: int
    """Of the server's counter."""
    here: int
    """Requests at the server."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one client."""

    exit_code: int
    output: str
    cpu_s: float
    """Its whole life: imports, data, load, statistics."""
    processes: int
    points: list[Point]
    """Readings from its start to its end."""

    @property
    def load_cpu_s(self) -> float:
        """CPU from the last reading before the first request to the first one after the last answer."""
        first, last = self._edges()
        return last.cpu_s - first.cpu_s

    @property
    def load_s(self) -> float:
        """Seconds between the same two readings."""
        first, last = self._edges()
        return last.t_s - first.t_s

    @property
    def tokens(self) -> int:
        """Tokens between the same two readings."""
        first, last = self._edges()
        return last.tokens - first.tokens

    @property
    def cpu_s_per_million(self) -> float:
        """CPU seconds per million tokens of the load alone."""
        return 1e6 * self.load_cpu_s / self.tokens

    def _edges(self) -> tuple[Point, Point]:
        busy = [index for index, point in enumerate(self.points) if point.here]
        assert busy, f"the client sent nothing: exit {self.exit_code}\n{self.output[-3000:]}"
        return self.points[max(0, busy[0] - 1)], self.points[min(len(self.points) - 1, busy[-1] + 1)]


def run(argv: list[str], base_url: str, *, folder: Path, environment: dict[str, str], timeout_s: float) -> Run:
    """Run one client to its end and read its CPU and the server's counters beside it."""
    out = folder / "client.log"
    points: list[Point] = []
    with out.open("wb") as log, Control(base_url) as control:
        client = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        tree, deadline = Tree(client.pid), time.monotonic() + timeout_s
        while client.poll() is None and time.monotonic() < deadline:
            page = parse(control.metrics())
            tokens, here = page.generation_tokens_total or 0, page.running or 0
            points.append(Point(time.monotonic(), tree.cpu_s(), tokens, here))
            time.sleep(PACE_S)
        client.kill()
        code = client.wait()
    return Run(
        exit_code=code,
        output=out.read_text(errors="replace"),
        cpu_s=points[-1].cpu_s,
        processes=tree.processes(),
        points=points,
    )


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Requests that were at the server at once, from shortly after the first to the last arrival, over time."""

    mean_error: float
    """Mean over time of |there - asked| / asked."""
    fewest: int
    most: int


def in_flight(changes: list[tuple[float, int]], asked: int, *, ramp_s: float) -> InFlight:
    """From the server's changes (time, requests there): after ``ramp_s``, while there was still one to send."""
    arrivals = [t for (_, before), (t, n) in itertools.pairwise(changes) if n > before]
    first, last = changes[0][0] + ramp_s, arrivals[-1]
    off = seconds = 0.0
    held = []
    for (start, n), (end, _) in itertools.pairwise(changes):
        span = min(end, last) - max(start, first)
        if span > 0:
            off, seconds = off + span * abs(n - asked) / asked, seconds + span
            held.append(n)
    return InFlight(mean_error=off / seconds, fewest=min(held), most=max(held))
