"""What is read beside the load: the server's counters and health, and how late the client's own loop is."""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable

import aiohttp

from autotune.engines.scrape import parse, to_sample
from autotune.records.observation import ClientStats, Sample

SCRAPE_LIMIT_S = 2.0
"""A page that takes longer is left out. A reading is dated to the middle of its request and answer, so this
bounds the error of its time by 1 s, 5 % of a 20-s window if it fell on one edge alone."""

TICK_S = 0.05
"""Pace of the loop's own ticks: 600 in a load of 30 s, six of them above the 99th percentile."""

HEALTH_LIMIT_S = 2.0


class Counters:
    """Reads the server's page of counters."""

    def __init__(self, session: aiohttp.ClientSession, url: str | None, now_s: Callable[[], float]) -> None:
        self._session, self._url, self._now_s = session, url, now_s

    async def read(self) -> Sample | None:
        """One reading; ``None`` where the page is late, broken, empty or not there: a gap, never a guess."""
        if self._url is None:
            return None
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(SCRAPE_LIMIT_S), self._session.get(self._url) as response:
                text = await response.text(encoding="utf-8", errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        if response.status != 200:
            return None
        middle_s = (sent_s + self._now_s()) / 2
        sample = to_sample(parse(text), middle_s)
        return None if sample.running is None and sample.generation_tokens is None else sample


async def is_dead(session: aiohttp.ClientSession, url: str) -> str | None:
    """Why the server is dead, in words; ``None``: it may live. 503 is what vLLM says of a dead engine."""
    try:
        async with asyncio.timeout(HEALTH_LIMIT_S), session.get(url) as response:
            return f"GET {response.url.path}: 503" if response.status == 503 else None
    except aiohttp.ClientConnectorError as error:
        # Of several addresses of one host the errors come joined, as text. Other errors (no file left, no
        # name server) say nothing about the server.
        refused = error.os_error.errno == errno.ECONNREFUSED or f"Errno {errno.ECONNREFUSED}" in str(error)
        return f"nothing listens any more: {error}" if refused else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


class Pulse:
    """Counts the client's own cost: CPU, lateness of its loop, requests in flight."""

    def __init__(self, in_flight: int) -> None:
        self.fewest = self.most = in_flight
        self._cpu_s = time.thread_time()
        self._late: Counter[int] = Counter()

    async def tick(self) -> None:
        """Measure how late the loop is, for ever."""
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late[round(1000 * max(0.0, time.perf_counter() - due))] += 1

    def hold(self, in_flight: int) -> None:
        """Note how many requests are in flight."""
        self.fewest, self.most = min(self.fewest, in_flight), max(self.most, in_flight)

    def stats(self) -> ClientStats:
        """The cost so far, of the thread that asks."""
        left = 0.01 * self._late.total()
        late_ms = 0
        for late_ms in sorted(self._late, reverse=True):
            left -= self._late[late_ms]
            if left < 0:
                break
        return ClientStats(
            cpu_s=time.thread_time() - self._cpu_s,
            loop_lag_p99_s=late_ms / 1000,
            in_flight_min=self.fewest,
            in_flight_max=self.most,
        )
