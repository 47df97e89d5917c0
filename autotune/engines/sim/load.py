"""One closed loop in virtual time: what ``engines/driver`` does with a real server, on the simulated one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.physics.closed_loop import ServerSample, ServerSim
from autotune.physics.simulator import Finished, SimRequest
from autotune.records.event import Emit, Event
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import (
    ClientStats,
    Failure,
    Observation,
    RequestError,
    RequestOutcome,
    Sample,
    StopRule,
)

RATE_SPAN_S = 10.0
FIRST_S, ASK_GROWTH = 60.0, 0.02
"""A stop rule reads the whole load each time it is asked. Where a second costs nothing, it is asked at every
sample of the first minute and then whenever the load is so much older, or ten minutes of load would take minutes."""
SHOW_EVERY_S = 30.0
"""Progress is told so often in virtual time, at every sample in real time."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server will do with a request."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    refused: str | None = None
    """Why the request itself is an error (4xx)."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The server's counters since its start."""

    generation_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Pace:
    """Lets virtual seconds take real ones: ``factor`` of them each; 0 takes none."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def wait(self, virtual_s: float) -> None:
        """Take the real time of so many virtual seconds."""
        if self.factor > 0:
            time.sleep(self.factor * virtual_s)


class VirtualLoad:
    """The state of one load."""

    def __init__(
        self,
        server: ServerSim,
        load: LoadPlan,
        *,
        answer: Callable[[Request], Answer],
        before: Counters,
        pace: Pace,
        emit: Emit,
        dies_s: float | None = None,
        death: Callable[[], Failure],
    ) -> None:
        """A load.

        Args:
            server: fresh, nothing in it.
            answer: what comes of a request.
            before: counters of the server so far.
            dies_s: time of this load at which the engine dies; ``None``: it does not.
            death: why.
        """
        self._server, self._load, self._answer, self._before = server, load, answer, before
        self._pace, self._emit, self._dies_s, self._death = pace, emit, dies_s, death
        self._refill = deque(load.refill)
        self._outcomes: list[RequestOutcome] = []
        """In the order of sending; an entry is replaced when its request ends."""
        self._open: dict[str, tuple[int, Answer]] = {}
        """Requests in flight by id, oldest first: index in ``_outcomes``, and what is coming."""
        self._samples: list[Sample] = []
        self._ended = self._failed = 0
        self._refused: str | None = None
        """The server refused the very first request: the load is not what was meant."""

    def run(self, stop: StopRule) -> Observation:
        """The whole load."""
        self._sample(0.0)
        for request in self._load.start:
            self._send(request, 0.0)
        sample_s = self._load.sample_s
        next_s, asked_s, shown_s = sample_s, 0.0, 0.0
        while self._open and self._refused is None:
            until_s = next_s if self._dies_s is None else min(next_s, self._dies_s)
            ended = self._server.advance(until_s)
            if ended:
                for done in ended:
                    self._close(done)
                continue
            if until_s == self._dies_s:
                return self._observation(until_s, "engine_died", self._death())
            self._pace.wait(sample_s)
            self._give_up(until_s)
            self._sample(until_s)
            if self._pace.factor or until_s - shown_s >= SHOW_EVERY_S:
                shown_s = until_s
                self._emit(Event(kind="load_sampled", data=self._progress()))
            if self._pace.factor or until_s <= FIRST_S or until_s - asked_s >= ASK_GROWTH * until_s:
                asked_s = until_s
                reason = stop(self._observation(until_s, "running"))
                if reason is not None:
                    return self._observation(until_s, f"stopped:{reason}")
            next_s += sample_s
        now_s = self._server.now_s
        if self._refused is not None:
            return self._observation(now_s, "stopped:client_error", Failure(kind="unknown", line=self._refused))
        self._sample(now_s)
        return self._observation(now_s, "drained")

    @property
    def counters(self) -> Counters:
        """Counters of the server now, earlier loads included."""
        return self._count(self._server.sample)

    def _count(self, now: ServerSample) -> Counters:
        before = self._before
        hit = self._server.engines[0].limits.hit_share
        again = round(now.recomputed_tokens * hit / (1.0 - hit))  # found in the prefix cache, not computed again
        return Counters(
            generation_tokens=before.generation_tokens + now.generated_tokens,
            prompt_tokens=before.prompt_tokens + now.prompt_tokens,
            preemptions=before.preemptions + now.preemptions,
            prefix_queries=before.prefix_queries + now.prompt_tokens + now.recomputed_tokens + again,
            prefix_hits=before.prefix_hits + again,
        )

    def _send(self, request: Request, at_s: float) -> None:
        """Send a request; one that is refused is an error at once, and the next takes its place."""
        following: Request | None = request
        while following is not None:
            answer = self._answer(following)
            opened = RequestOutcome(
                id=following.id, sent_s=at_s, ended_s=None, prompt_tokens=None, output_tokens=None, finish_reason=None
            )
            self._outcomes.append(opened)
            if answer.refused is None:
                self._open[following.id] = (len(self._outcomes) - 1, answer)
                sent = SimRequest(
                    id=following.id, prompt_tokens=answer.prompt_tokens, output_tokens=answer.output_tokens
                )
                self._server.submit(sent, at_s)
                return
            if self._ended == 0:
                self._refused = answer.refused
                return
            self._fail(len(self._outcomes) - 1, at_s, RequestError(kind="client", message=answer.refused))
            following = self._refill.popleft() if self._refill else None

    def _close(self, done: Finished) -> None:
        if done.request.id not in self._open:
            return  # was given up
        index, answer = self._open.pop(done.request.id)
        self._ended += 1
        self._outcomes[index] = replace(
            self._outcomes[index],
            ended_s=done.ended_s,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
        )
        if self._refill:
            self._send(self._refill.popleft(), done.ended_s)

    def _give_up(self, now_s: float) -> None:
        """Time-outs, looked for at each sample. The simulated server goes on with what nobody waits for."""
        while self._open:
            name, (index, _) = next(iter(self._open.items()))
            if self._outcomes[index].sent_s + self._load.request_limit_s > now_s:
                return
            del self._open[name]
            line = f"no end within {self._load.request_limit_s:g} s"
            self._fail(index, now_s, RequestError(kind="timeout", message=line))
            if self._refill:
                self._send(self._refill.popleft(), now_s)

    def _fail(self, index: int, at_s: float, error: RequestError) -> None:
        self._ended += 1
        self._failed += 1
        self._outcomes[index] = replace(self._outcomes[index], ended_s=at_s, error=error)

    def _sample(self, t_s: float) -> None:
        now = self._server.sample
        counters = self._count(now)
        self._samples.append(
            Sample(
                t_s=t_s,
                running=now.running,
                waiting=now.waiting,
                kv_usage=now.kv_usage,
                generation_tokens=counters.generation_tokens,
                prompt_tokens=counters.prompt_tokens,
                preemptions=counters.preemptions,
                prefix_queries=counters.prefix_queries,
                prefix_hits=counters.prefix_hits,
            )
        )

    def _observation(self, t_s: float, end: str, failure: Failure | None = None) -> Observation:
        n = self._load.concurrency
        return Observation(
            t_s=t_s,
            concurrency=n,
            samples=tuple(self._samples),
            requests=tuple(self._outcomes),
            client=ClientStats(cpu_s=0.0, loop_lag_p99_s=0.0, in_flight_min=n, in_flight_max=n),
            end=end,
            failure=failure,
        )

    def _progress(self) -> dict[str, object]:
        """What is shown while a load runs; the same as of a real one."""
        last = self._samples[-1]
        first = self._samples[max(0, len(self._samples) - 1 - round(RATE_SPAN_S / self._load.sample_s))]
        tokens = (last.generation_tokens or 0) - (first.generation_tokens or 0)
        return {
            "t_s": round(last.t_s, 1),
            "concurrency": self._load.concurrency,
            "in_flight": len(self._open),
            "running": last.running,
            "waiting": last.waiting,
            "kv_usage": last.kv_usage,
            "output_tokens_per_s": tokens / (last.t_s - first.t_s),
            "ended": self._ended,
            "failed": self._failed,
        }
