"""The periodic stats line of every vLLM, V0 to 0.33: one line -> ``StatsLine``, and a clock for stamps without year.

Optional parts come and go between versions and some hold commas, so values are found by key. Reading a line has
two steps, because a log may hold millions of them: ``glance`` takes what a summary needs of each, ``read_stats``
all of it where it is wanted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from autotune.engines.logline import LogLine

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_GLANCE = re.compile(
    r"(?:Engine (\d+): |(\d+) Engines Aggregated: )?"
    rf"Avg prompt throughput: {_NUMBER} tokens/s, Avg generation throughput: {_NUMBER} tokens/s"
    rf".*? KV cache usage: {_NUMBER}%"
)
# `Running: 1 reqs`, `GPU KV cache usage: 5.6%`, `Prefix cache hit rate: GPU: 0.00%`: any key, its number, its unit.
_PART = re.compile(rf"([A-Za-z][A-Za-z ]+): (?:GPU: )?{_NUMBER}(%?)")

_MONTH_STARTS = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
_DAY_S = 86400
_HALF_YEAR_S = 182 * _DAY_S


class StatsLine(NamedTuple):
    """One periodic line: throughputs are means over the interval that it closes."""

    t_s: float | None
    """Seconds since the first stats line of the log; ``None``: no time stamp."""
    stamp: str | None
    """``MM-DD HH:MM:SS``, local time of the server."""
    server: int
    """Which server of the log wrote it, counted from 0."""
    source: str
    """What tells engines of the same number apart: the process or service in front of the line."""
    engine: int
    """Number of the engine; 0 where the line has none."""
    engines: int
    """Engines that the line sums up: 1 but for ``N Engines Aggregated``."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: int | None
    waiting: int | None
    """V0: ``Pending``."""
    kv_usage: float
    """0..1; V0: of the GPU."""
    prefix_hit_rate: float | None
    """0..1, over the last 1000 requests; ``None``: not printed."""
    preemptions: int | None
    swapped: int | None
    deferred: int | None
    external_prefix_hit_rate: float | None
    mm_hit_rate: float | None


class Glance(NamedTuple):
    """What a summary needs of each stats line."""

    line: LogLine
    server: int
    key: tuple[str, int]
    """Which engine: who printed the line, and its number."""
    engines: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    kv_usage: float
    """0..1, not rounded."""


class Clock:
    """Elapsed seconds from stamps without a year: a jump back by more than half a year is the next year."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._year_s = 0.0
        self._leap = False

    def elapsed(self, stamp: str | None) -> float | None:
        """Seconds since the first stamp given (small steps back stay: two processes in one log)."""
        if stamp is None:
            return None
        self._leap = self._leap or stamp.startswith("02-29")
        at = self._year_s + _seconds(stamp, leap=self._leap)
        if self._first is None:
            self._first = at
        elif at < self._last - _HALF_YEAR_S:
            year_s = (366 if self._leap else 365) * _DAY_S
            self._year_s, self._leap = self._year_s + year_s, False
            at += year_s
        self._last = at
        return at - self._first


def _seconds(stamp: str, *, leap: bool) -> float:
    """Seconds since the begin of the stamp's year."""
    month, day = min(max(int(stamp[0:2]), 1), 12), int(stamp[3:5])
    days = _MONTH_STARTS[month - 1] + day - 1 + (1 if leap and month > 2 else 0)
    return float(days * _DAY_S + int(stamp[6:8]) * 3600 + int(stamp[9:11]) * 60 + int(stamp[12:14]))


def glance(line: LogLine, server: int) -> Glance | None:
    """What a summary needs of a stats line; ``None`` for any other line, and for one that was cut in the middle."""
    if (match := _GLANCE.match(line.text)) is None:
        return None
    engine, count, prompt_rate, output_rate, percent = match.groups()
    return Glance(
        line,
        server,
        (line.front.source, int(engine or 0)),
        int(count or 1),
        float(prompt_rate),
        float(output_rate),
        float(percent) / 100,
    )


def read_stats(seen: Glance, clock: Clock) -> StatsLine:
    """All values of a stats line."""
    parts = _parts(seen.line.text)
    stamp = seen.line.stamp
    return StatsLine(
        t_s=clock.elapsed(stamp),
        stamp=stamp,
        server=seen.server,
        source=seen.key[0],
        engine=seen.key[1],
        engines=seen.engines,
        prompt_tokens_per_s=seen.prompt_tokens_per_s,
        output_tokens_per_s=seen.output_tokens_per_s,
        running=_whole(parts.get("Running")),
        waiting=_whole(parts.get("Waiting", parts.get("Pending"))),
        kv_usage=round(seen.kv_usage, 9),
        prefix_hit_rate=_share(parts.get("Prefix cache hit rate")),
        preemptions=_whole(parts.get("Preemptions")),
        swapped=_whole(parts.get("Swapped")),
        deferred=_whole(parts.get("Deferred")),
        external_prefix_hit_rate=_share(parts.get("External prefix cache hit rate")),
        mm_hit_rate=_share(parts.get("MM cache hit rate")),
    )


def read_prefix_hit_rate(text: str) -> float | None:
    """``Prefix cache hit rate``, 0..1; V0 prints it on a line of its own, -1 meaning that it is off."""
    return _share(_parts(text).get("Prefix cache hit rate"))


def long_before(old: LogLine, new: LogLine, limit_s: float) -> bool:
    """Whether a line is more than ``limit_s`` older than another, as far as their stamps tell."""
    if old.stamp is None or new.stamp is None:
        return True
    return (_seconds(new.stamp, leap=True) - _seconds(old.stamp, leap=True)) % (366 * _DAY_S) > limit_s


def _parts(text: str) -> dict[str, str]:
    """Number by key; a share without its percent sign was cut and does not count."""
    return {
        key: number for key, number, percent in _PART.findall(text) if percent or not key.endswith(("usage", "rate"))
    }


def _whole(text: str | None) -> int | None:
    return None if text is None else int(float(text))


def _share(percent: str | None) -> float | None:
    if percent is None or percent.startswith("-"):
        return None
    return round(float(percent) / 100, 9)
