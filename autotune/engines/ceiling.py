"""What the load generator can carry on this host: measured in ten seconds against a server that computes nothing."""

from __future__ import annotations

import itertools
import json
import math
import urllib.request
from dataclasses import dataclass
from typing import ClassVar

from autotune.engines import nullserver
from autotune.engines.driver import Target, drive
from autotune.engines.scrape import fetch, parse
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import Observation

STREAMS = 512
FIRST_RATE = 4000.0
"""Tokens per second of the first try: what one H200 gives."""
TRIES = 4
SETTLE_S, SPAN_S = 0.7, 1.0
"""Of each try: connections are made, then it counts."""
PACE_S = 0.05
ANSWER_TOKENS = 1000
IN_FLIGHT = 256
"""Of the answers that are not streamed."""
PROMPT = tuple(range(1, 65))


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """How much one client process carries while it stays within the limits of a valid measurement."""

    SCHEMA: ClassVar[str] = "autotune/ceiling/1"

    streams: int
    tokens_per_s: float | None
    """Largest rate of all streams together that was held, a chunk for each token; ``None``: not even the first."""
    cpu_s_per_million_tokens: float
    """At that rate (where none was held: at the lowest one tried)."""
    loop_lag_s: float
    """99th percentile of how late the client's own loop was, at the same rate."""
    whole_answers_per_s: float
    """Not streamed, 1,000 tokens each: what the client and the null server can do together."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """One rate, tried."""

    tokens_per_s: float
    """As the server counted them."""
    cpu_share: float
    """Of one core."""
    loop_lag_s: float

    @property
    def cpu_s_per_token(self) -> float:
        """CPU seconds of one token, one chunk."""
        return self.cpu_share / self.tokens_per_s


def client_ceiling(*, cpu_limit: float, lag_limit_s: float) -> Ceiling:
    """The client's ceiling; takes about ten seconds and a core of the machine.

    Rates are tried in turn, each next one where the CPU of the last would meet its limit: the first that is not
    held is followed by one between it and the largest that was.

    Args:
        cpu_limit: share of a core above which a measurement is not valid (the client's one thread does all).
        lag_limit_s: lateness of the client's loop above which it is not.
    """
    with nullserver.started() as url:
        held: Try | None = None
        lowest: Try | None = None
        failed_rate, rate = math.inf, FIRST_RATE
        for _ in range(TRIES):
            seen = _streamed(url, rate)
            if seen.cpu_share <= cpu_limit and seen.loop_lag_s <= lag_limit_s:
                held = seen if held is None or seen.tokens_per_s > held.tokens_per_s else held
            else:
                failed_rate = rate
                lowest = seen if lowest is None or seen.tokens_per_s < lowest.tokens_per_s else lowest
            rate = _next_rate(held, failed_rate, cpu_limit)
        told = held or lowest
        assert told is not None
        return Ceiling(
            streams=STREAMS,
            tokens_per_s=None if held is None else held.tokens_per_s,
            cpu_s_per_million_tokens=1e6 * told.cpu_s_per_token,
            loop_lag_s=told.loop_lag_s,
            whole_answers_per_s=_whole(url),
        )


def _next_rate(held: Try | None, failed_rate: float, cpu_limit: float) -> float:
    if held is None:
        return failed_rate / 2
    wanted = 0.95 * cpu_limit / held.cpu_s_per_token
    return wanted if wanted < failed_rate else math.sqrt(held.tokens_per_s * failed_rate)


def _streamed(url: str, rate: float) -> Try:
    _pace(url, STREAMS / rate)
    watch = _Watch(url)
    requests = tuple(Request(id=str(n), prompt=PROMPT, max_tokens=1 << 20, forced=True) for n in range(STREAMS))
    load = LoadPlan(start=requests, stream=True, stall_s=None)
    drive(Target(base_url=url, model=nullserver.MODEL), load, stop=watch, alive=lambda: None, sample_s=PACE_S)
    return watch.seen()


class _Watch:
    """A stop rule that notes how late it is asked and what the client has used; no counters are read meanwhile."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._marks: list[tuple[float, float]] = []
        self._tokens: list[int] = []

    def __call__(self, seen: Observation) -> str | None:
        if seen.t_s < SETTLE_S:
            return None
        over = bool(self._marks) and seen.t_s >= self._marks[0][0] + SPAN_S
        self._marks.append((seen.t_s, seen.client.cpu_s))
        if over or len(self._marks) == 1:
            self._tokens.append(parse(fetch(self._url)).generation_tokens_total or 0)
        return "done" if over else None

    def seen(self) -> Try:
        (first_s, first_cpu_s), (last_s, last_cpu_s) = self._marks[0], self._marks[-1]
        # The first gap holds our own reading of the counters.
        late = sorted(max(0.0, b - a - PACE_S) for (a, _), (b, _) in itertools.pairwise(self._marks[1:]))
        return Try(
            tokens_per_s=max(1, self._tokens[1] - self._tokens[0]) / (last_s - first_s),
            cpu_share=(last_cpu_s - first_cpu_s) / (last_s - first_s),
            loop_lag_s=late[math.ceil(0.99 * len(late)) - 1] if late else last_s - first_s,
        )


def _whole(url: str) -> float:
    """Answers per second, not streamed, written by the server at once."""
    _pace(url, 0.0)
    seconds = SETTLE_S + SPAN_S
    requests = tuple(
        Request(id=str(n), prompt=PROMPT, max_tokens=ANSWER_TOKENS, forced=True) for n in range(IN_FLIGHT + 40_000)
    )
    load = LoadPlan(start=requests[:IN_FLIGHT], refill=requests[IN_FLIGHT:], stall_s=None)
    target = Target(base_url=url, model=nullserver.MODEL)
    seen = drive(
        target,
        load,
        stop=lambda so_far: "done" if so_far.t_s >= seconds else None,
        alive=lambda: None,
        sample_s=PACE_S,
    )
    ends = [r.ended_s for r in seen.requests if r.ended_s is not None and r.error is None]
    counted = [ended_s for ended_s in ends if ended_s >= SETTLE_S]
    return len(counted) / (seen.t_s - SETTLE_S)


def _pace(url: str, token_s: float) -> None:
    body = json.dumps({"token_s": token_s}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/config", body, method="POST"), timeout=10):
        return
