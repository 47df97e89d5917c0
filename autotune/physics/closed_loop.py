"""Several data-parallel engines behind one address, and a client that holds N requests in flight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.physics.simulator import EngineLimits, EngineSim, Finished, Noise, SimRequest
from autotune.physics.steptime import StepModel

QUEUED_WEIGHT = 4
"""vLLM's router sends to the engine with the least 4 x waiting + running."""


class ServerSim:
    """Engines of one server; each has its own clock, requests go to the least loaded."""

    def __init__(self, model: StepModel, limits: EngineLimits, *, engines: int = 1, noise: Noise | None = None) -> None:
        if engines < 1:
            raise ValueError(f"a server needs at least one engine, got {engines}")
        self.engines = [EngineSim(model, limits, noise=noise) for _ in range(engines)]
        self.now_s = 0.0

    def submit(self, request: SimRequest, at_s: float | None = None) -> None:
        """Send a request (default: now) to the least loaded engine."""
        at = self.now_s if at_s is None else max(at_s, self.now_s)
        engine = min(self.engines, key=lambda e: e.load + (QUEUED_WEIGHT - 1) * e.waiting)
        engine.submit(request, at)

    def place(self, request: SimRequest) -> bool:
        """Put a request of a run under way into the emptiest cache; False: no room there."""
        return min(self.engines, key=lambda e: e.kv_usage).place(request)

    def advance(self, until_s: float) -> list[Finished]:
        """Run to ``until_s``, or to the first end of an answer (all that end in that step)."""
        if len(self.engines) == 1:
            finished = self.engines[0].advance(until_s)
            self.now_s = self.engines[0].now_s if finished else max(self.now_s, until_s)
            return finished
        while True:
            index = min(range(len(self.engines)), key=lambda i: self.engines[i].next_s())
            engine, end = self.engines[index], self.engines[index].next_s()
            if end > until_s:
                for other in self.engines:
                    other.advance(until_s)  # no answer ends by then: every next event is later
                self.now_s = max(self.now_s, until_s)
                return []
            finished = engine.advance(end)
            if finished:
                self.now_s = max(self.now_s, engine.now_s)
                return [dataclasses.replace(f, engine=index) for f in finished]

    @property
    def sample(self) -> ServerSample:
        """Gauges and counters now."""
        return ServerSample(
            t_s=self.now_s,
            running=sum(e.running for e in self.engines),
            waiting=sum(e.waiting for e in self.engines),
            kv_tokens=sum(e.kv_tokens for e in self.engines),
            kv_usage=max(e.kv_usage for e in self.engines),
            generated_tokens=sum(e.generated_tokens for e in self.engines),
            prompt_tokens=sum(e.prompt_tokens for e in self.engines),
            recomputed_tokens=sum(e.recomputed_tokens for e in self.engines),
            preemptions=sum(e.preemptions for e in self.engines),
        )


@dataclass(frozen=True, kw_only=True)
class ServerSample:
    """State of a simulated server; sums over engines, ``kv_usage`` the largest."""

    t_s: float
    running: int
    waiting: int
    kv_tokens: int
    kv_usage: float
    generated_tokens: int
    prompt_tokens: int
    recomputed_tokens: int
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class ClosedLoopRun:
    """One simulated run."""

    makespan_s: float
    """First send to last end."""
    drain_s: float
    """Moment of the last send: from then on fewer than the concurrency are in flight."""
    finished: tuple[Finished, ...]
    """In the order of their ends."""
    samples: tuple[ServerSample, ...]
    end: ServerSample
    """Counters at the end."""
    kv_full_s: float | None
    """First preemption, to a sample; ``None``: never."""


def run_closed_loop(
    model: StepModel,
    limits: EngineLimits,
    requests: Iterable[SimRequest],
    concurrency: int,
    *,
    engines: int = 1,
    resident: Sequence[SimRequest] = (),
    sample_s: float = math.inf,
    noise: Noise | None = None,
    limit_s: float = math.inf,
) -> ClosedLoopRun:
    """Send ``requests`` in order, never more than ``concurrency`` in flight over all engines.

    Args:
        resident: requests of a run under way; they are in the cache at the start and count as in flight.
            Their ``prompt_tokens`` are the tokens cached, ``output_tokens`` what is still to be written.
            Those for which there is no room go to the queue first.
        sample_s: seconds between samples.
        limit_s: stop there, whatever is in flight.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    server = ServerSim(model, limits, engines=engines, noise=noise)
    in_flight = len(resident)
    for request in [r for r in resident if not server.place(r)]:
        server.submit(request)
    pending = iter(requests)
    finished: list[Finished] = []
    samples: list[ServerSample] = []
    drain_s, kv_full_s, next_sample = 0.0, None, sample_s if sample_s < math.inf else limit_s
    while True:
        while in_flight < concurrency:
            request_or_none = next(pending, None)
            if request_or_none is None:
                break
            server.submit(request_or_none)
            in_flight += 1
            drain_s = server.now_s
        if in_flight == 0 or server.now_s >= limit_s:
            break
        ended = server.advance(min(next_sample, limit_s))
        finished += ended
        in_flight -= len(ended)
        if not ended:
            sample = server.sample
            if sample_s < math.inf:
                samples.append(sample)
                next_sample += sample_s
            if kv_full_s is None and sample.preemptions:
                kv_full_s = sample.t_s
    return ClosedLoopRun(
        makespan_s=server.now_s,
        drain_s=drain_s,
        finished=tuple(finished),
        samples=tuple(samples),
        end=server.sample,
        kv_full_s=kv_full_s,
    )
