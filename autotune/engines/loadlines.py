"""Stats lines put together: the newest of each engine, and the peak over engines. Memory does not grow with the log."""

from __future__ import annotations

from collections import OrderedDict

from autotune.engines.statsline import Clock, Glance, StatsLine, long_before, read_stats

STAMPS = 64
"""Time stamps at which engines' lines are still summed; older ones are final."""
SIDE_BY_SIDE_S = 30.0
"""A source that was silent for so long when a new one appeared has been replaced by it."""


class NewestLines:
    """The newest line of each engine of the server (or servers side by side) that wrote last.

    A server that starts, or a source not seen before, makes older lines stale; one that goes on writing comes
    back to life with its next line.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], Glance] = {}
        self._stale: set[tuple[str, int]] = set()
        self._newest: tuple[str, int] | None = None
        self._hit_rate: float | None = None

    @property
    def lines(self) -> list[StatsLine]:
        """One line an engine; empty before the first."""
        alive = [key for key in self._lines if key not in self._stale] or list(self._lines)
        lines = [read_stats(self._lines[key], Clock()) for key in alive]
        if self._hit_rate is not None:
            lines = [line._replace(prefix_hit_rate=self._hit_rate) for line in lines]
        return lines

    def server_started(self) -> None:
        """A server printed its banner."""
        self._lines = {key: line for key, line in self._lines.items() if key not in self._stale} or self._lines
        self._stale = set(self._lines)

    def add(self, seen: Glance) -> None:
        """Take the next line."""
        key = seen.key
        if key not in self._lines and all(source != key[0] for source, _ in self._lines):
            self._stale |= {k for k, old in self._lines.items() if long_before(old.line, seen.line, SIDE_BY_SIDE_S)}
        self._lines[key] = seen
        self._stale.discard(key)
        self._hit_rate = None

    def add_hit_rate(self, rate: float | None) -> None:
        """V0 prints the prefix hit rate on a line of its own, after the stats line of its only engine."""
        self._hit_rate = rate


class PeakRate:
    """Largest sum of output throughput over engines at one time stamp."""

    def __init__(self) -> None:
        self._stamps: OrderedDict[str, dict[tuple[str, int], float]] = OrderedDict()
        self._largest: float | None = None

    @property
    def value(self) -> float | None:
        """Tokens/s; ``None`` before the first line."""
        sums = [sum(rates.values()) for rates in self._stamps.values()]
        largest = max(sums if self._largest is None else [self._largest, *sums], default=None)
        return None if largest is None else round(largest, 6)

    def add(self, seen: Glance) -> None:
        """Take the next line."""
        rate, stamp = seen.output_tokens_per_s, seen.line.stamp
        if stamp is None:
            self._largest = max(rate, self._largest or 0.0)
            return
        rates = self._stamps.get(stamp)
        if rates is None:
            rates = self._stamps[stamp] = {}
        if rate > rates.get(seen.key, -1.0):
            rates[seen.key] = rate
        if len(self._stamps) > STAMPS:
            _, old = self._stamps.popitem(last=False)
            self._largest = max(sum(old.values()), self._largest or 0.0)
