"""The closed loop: exactly N in flight, each end replaced at once by the next of refill.

Nothing is sent twice. A lane whose request failed waits before it sends the next one (0.25 s, doubled at
each further failure, at most 5 s): a server that is going down is not hammered through the whole refill,
and the missing request is counted in ``in_flight_min``. A time-out is followed at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import uvloop

from autotune.engines.driver.exchange import Exchange, open_session
from autotune.engines.driver.target import Target
from autotune.engines.driver.watch import Counters, Pulse, is_dead
from autotune.records.event import Emit, Event, nowhere
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import Failure, Observation, RequestOutcome, Sample, StopRule

ALIVE_S = 0.25
"""Pace at which the server's process is looked at."""

BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 5.0

IDLE_LIMIT_S = 10.0
"""How long the server may take to give up what was cancelled, before the next load."""

CANCEL_LIMIT_S = 2.0

RATE_SPAN_S = 10.0
"""Span of the throughput that is shown while a load runs."""


def drive(
    target: Target,
    load: LoadPlan,
    *,
    stop: StopRule,
    alive: Callable[[], Failure | None],
    sample_s: float | None = None,
    limit_s: float | None = None,
    stall_s: float | None = None,
    emit: Emit = nowhere,
) -> Observation:
    """Run one load to its end, in this thread, on an event loop of its own.

    Args:
        stop: Asked every ``sample_s`` with the observation so far, whether or not the page of counters
            could be read; its reason ends the load (``stopped:<reason>``).
        alive: Asked every 0.25 s; must return at once. A failure ends the load (``engine_died``).
        sample_s: Pace of the readings of the server's counters, seconds; ``None``: the plan's.
        limit_s: Longest load (``limit``); ``None``: none.
        stall_s: Longest time without a token counted, a chunk or an end (``stalled``); ``None``: the plan's,
            which may be no limit. There is none either for a server without counters, unless it streams.
        emit: Told of each ``load_sampled``, and a ``note`` when the server does not come to rest.

    Returns:
        The observation; requests in the order in which they were sent, those still in flight at the end
        with ``ended_s`` None. Their connections are closed and the server is idle again, or had 10 s.

    Never raises for what the server does. A signal handler's exception (KeyboardInterrupt, SystemExit)
    cancels everything and passes through; one of ``stop`` or ``alive`` does too, as a bug.

    Raises:
        PrerequisiteError: this process may not have so many connections open.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pace_s = load.sample_s if sample_s is None else sample_s
        silence_s = load.stall_s if stall_s is None else stall_s
        return runner.run(_Loop(target, load, stop, alive, pace_s, limit_s, silence_s, emit).run())


class _Loop:
    """The state of one load."""

    def __init__(
        self,
        target: Target,
        load: LoadPlan,
        stop: StopRule,
        alive: Callable[[], Failure | None],
        sample_s: float,
        limit_s: float | None,
        stall_s: float | None,
        emit: Emit,
    ) -> None:
        self.target, self.load, self.stop, self.alive, self.emit = target, load, stop, alive, emit
        self.sample_s, self.limit_s, self.stall_s = sample_s, limit_s, stall_s
        self.refill = deque(load.refill)
        self.in_flight = load.concurrency
        self.samples: list[Sample] = []
        self.outcomes: list[RequestOutcome] = []
        """In the order of sending; an entry is replaced when its request ends."""
        self.ended = self.failed = 0
        self.doubt = False
        """A request failed in a way that a dead server would explain."""
        self.life: tuple[object, ...] = ()
        self.life_s = 0.0
        """Last sign of life, and when it was seen."""
        self.end, self.end_s = "running", 0.0
        self.failure: Failure | None = None
        self.bug: BaseException | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Observation:
        """The whole load."""
        self.over = asyncio.Event()
        async with open_session(self.load.concurrency) as session:
            self.exchange = Exchange(session, self.target, self.load)
            self.counters = Counters(session, self.target.metrics_url, self.exchange.now_s)
            before = await self.counters.read()
            self.pulse = Pulse(self.in_flight)
            self.exchange.started_s = time.perf_counter()
            if before is not None:
                self.samples.append(replace(before, t_s=0.0))
            lanes = [asyncio.create_task(self._lane(request)) for request in self.load.start]
            beside = (self.pulse.tick(), self._sampling(), self._watching(session), self._draining(lanes))
            self.tasks = [*lanes, *(asyncio.create_task(task) for task in beside)]
            for task in self.tasks:
                task.add_done_callback(self._notice)
            try:
                await self.over.wait()
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.wait(self.tasks, timeout=CANCEL_LIMIT_S)
            if self.bug is not None:
                raise self.bug
            self.outcomes = [self.exchange.begun(r) if r.ended_s is None else r for r in self.outcomes]
            observation = self._observation(self.end_s)
            await self._idle()
        return observation

    def _finish(self, end: str, failure: Failure | None = None) -> None:
        """End the load, once; what is in flight is cancelled and counts as in flight at the end."""
        if self.over.is_set():
            return
        self.end, self.end_s, self.failure = end, self.exchange.now_s(), failure
        self.over.set()
        for task in self.tasks:
            task.cancel()

    def _notice(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.bug = self.bug or error
            self.over.set()

    async def _lane(self, first: Request) -> None:
        """One place of the N: sends a request, and the next of refill as soon as it ends."""
        request: Request | None = first
        failures = 0
        while request is not None:
            index = len(self.outcomes)
            opened = RequestOutcome(
                id=request.id,
                sent_s=self.exchange.now_s(),
                ended_s=None,
                prompt_tokens=None,
                output_tokens=None,
                finish_reason=None,
            )
            self.outcomes.append(opened)
            outcome = self.outcomes[index] = await self.exchange.send(opened, request)
            self._count(outcome)
            failures = failures + 1 if outcome.error is not None and outcome.error.kind != "timeout" else 0
            if failures and self.refill:
                self._hold(-1)
                await asyncio.sleep(min(BACKOFF_S * 2 ** (failures - 1), LONGEST_BACKOFF_S))
                self._hold(1)
            request = self.refill.popleft() if self.refill else None
        # No replacement: this is the drain, which in_flight_min does not count.
        self.in_flight -= 1

    def _hold(self, change: int) -> None:
        self.in_flight += change
        self.pulse.hold(self.in_flight)

    def _count(self, outcome: RequestOutcome) -> None:
        self.ended += 1
        if outcome.error is None:
            return
        self.failed += 1
        self.doubt = self.doubt or outcome.error.kind in ("connect", "server")
        if outcome.error.kind == "client" and self.ended == 1:
            hint = "the server refuses the request itself: check the model's name, the key and the limits"
            self._finish("stopped:client_error", Failure(kind="unknown", line=outcome.error.message, hint=hint))

    async def _draining(self, lanes: list[asyncio.Task[None]]) -> None:
        """Ends the load when no lane has anything left to send, with a last reading."""
        await asyncio.wait(lanes)
        await self._sample()
        self._finish("drained")

    async def _sampling(self) -> None:
        """Reads the counters at each multiple of the pace, then asks whether the load is over."""
        while not self.over.is_set():
            now = self.exchange.now_s()
            await asyncio.sleep(self.sample_s - now % self.sample_s)
            await self._sample()
            observation = self._observation(self.exchange.now_s())
            self.emit(Event(kind="load_sampled", data=self._progress()))
            reason = self.stop(observation)
            if reason is not None:
                self._finish(f"stopped:{reason}")
            elif (line := self._stall()) is not None:
                self._finish("stalled", Failure(kind="stalled", line=line))

    async def _sample(self) -> None:
        sample = await self.counters.read()
        if sample is not None:
            self.samples.append(sample)

    async def _watching(self, session: aiohttp.ClientSession) -> None:
        """Looks at the server's process, at the limit, and after a failed request at its health."""
        url = self.target.health_url
        while not self.over.is_set():
            await asyncio.sleep(ALIVE_S)
            failure = self.alive()
            if failure is None and self.doubt and url is not None:
                self.doubt = False
                line = await is_dead(session, url)
                if line is not None:
                    failure = self.alive() or Failure(kind="engine_died", line=line)
            if failure is not None:
                self._finish("engine_died", failure)
            elif self.limit_s is not None and self.exchange.now_s() >= self.limit_s:
                self._finish("limit")

    def _stall(self) -> str | None:
        """Why the server has stalled, in words; ``None``: it lives, or cannot be seen to."""
        now = self.exchange.now_s()
        last = self.samples[-1] if self.samples else None
        counts = None if last is None else (last.generation_tokens, last.prompt_tokens)
        life = (counts, self.ended, self.exchange.chunks)
        if life != self.life:
            self.life, self.life_s = life, now
        visible = self.load.stream or (last is not None and last.generation_tokens is not None)
        if self.stall_s is None or not visible or now - self.life_s <= self.stall_s:
            return None
        held = "" if last is None else f" (last seen: {last.running} running, {last.waiting} waiting)"
        return f"no token for {now - self.life_s:.0f} s with {self.in_flight} requests in flight{held}"

    def _observation(self, t_s: float) -> Observation:
        """The load so far. Two copies of pointers and a percentile: 0.1 ms at 10,000 requests."""
        return Observation(
            t_s=t_s,
            concurrency=self.load.concurrency,
            samples=tuple(self.samples),
            requests=tuple(self.outcomes),
            client=self.pulse.stats(),
            end=self.end,
            failure=self.failure,
        )

    def _progress(self) -> dict[str, object]:
        """What is shown while a load runs."""
        last = self.samples[-1] if self.samples else None
        return {
            "t_s": round(self.exchange.now_s(), 1),
            "concurrency": self.load.concurrency,
            "in_flight": self.in_flight,
            "running": last and last.running,
            "waiting": last and last.waiting,
            "kv_usage": last and last.kv_usage,
            "output_tokens_per_s": self._recent_rate(),
            "ended": self.ended,
            "failed": self.failed,
        }

    def _recent_rate(self) -> float | None:
        recent = [(s.t_s, s.generation_tokens) for s in self.samples[-64:] if s.generation_tokens is not None]
        recent = [reading for reading in recent if reading[0] >= recent[-1][0] - RATE_SPAN_S]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    async def _idle(self) -> None:
        """Wait until the server has given up what was cancelled, so that the next load starts clean."""
        if not self.samples or self.end in ("engine_died", "stalled"):
            return
        until = self.exchange.now_s() + IDLE_LIMIT_S
        while self.exchange.now_s() < until:
            sample = await self.counters.read()
            if sample is not None and not sample.running and not sample.waiting:
                return
            await asyncio.sleep(0.1)
        text = f"the server still holds requests {IDLE_LIMIT_S:g} s after the load"
        self.emit(Event(kind="note", data={"text": text}))
