"""The server's counter of generated tokens over time, read as ``autotune scrape`` reads it."""

from __future__ import annotations

import itertools
import threading
import time

from autotune.engines.control import Control
from autotune.engines.scrape import Reading, poll

Points = list[tuple[float, float]]
"""Time in seconds, tokens since the start of the load."""


class CounterReader:
    """Reads the counters once a second, beside."""

    def __init__(self, control: Control) -> None:
        self._readings: list[Reading] = []
        self._leave = threading.Event()
        self._control = control
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> CounterReader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        self._thread.join()

    def _read(self) -> None:
        for reading in poll(self._control.metrics, every_s=1.0):
            self._readings.append(reading)
            if self._leave.is_set():
                return

    def points(self) -> Points:
        """On the clock of ``time.perf_counter()``."""
        shift = time.perf_counter() - time.time()
        found = [(r.t + shift, r.metrics.generation_tokens_total) for r in self._readings if r.metrics is not None]
        return since_start(found)


def since_start(readings: list[tuple[float, int | None]]) -> Points:
    known = [(t, tokens) for t, tokens in readings if tokens is not None]
    return [(t, tokens - known[0][1]) for t, tokens in known]


def passed(points: Points, tokens: float) -> float:
    """When so many tokens were there, between two readings in proportion."""
    for (t0, n0), (t1, n1) in itertools.pairwise(points):
        if n0 <= tokens <= n1 and n1 > n0:
            return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)
    raise AssertionError(f"{tokens} tokens were never reached, the last reading has {points[-1][1]}")
