"""Continuous batching of one engine, jumped from event to event: KV blocks, admission, prefill, preemption.

What vLLM's scheduler does (V1): decoding sequences come first; prompts are computed in chunks beside them
within ``max_num_batched_tokens``; a request is admitted when its whole prompt fits the free KV blocks and
fewer than ``max_num_seqs`` run; when a decoding sequence needs a block and none is free, the newest
admitted one loses its blocks, goes to the head of the queue and is computed again later, and nothing is
admitted in that step. Steps without prefill are jumped over in one go: their duration is linear in the KV
tokens, and block needs repeat every ``block_size`` steps, so finishes, the moment the blocks run out and
any instant are found in closed form. Step by step is done only while prompts are computed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from autotune.physics.steptime import StepModel

NOISE_EVERY_S = 1.0
"""A noise hook is asked again after so many seconds."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What one engine may hold and do in a step."""

    kv_tokens: int
    """KV cache of this engine, tokens."""
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    hit_share: float = 0.0
    """Share of a preempted sequence's tokens that the prefix cache still holds when it comes back, 0..1."""


@dataclass(frozen=True, kw_only=True)
class SimRequest:
    """One request whose answer's length is known."""

    id: str
    prompt_tokens: int
    """Tokens that are computed before the first new one: the prompt, and an answer so far that is sent along."""
    output_tokens: int
    """Tokens that are written."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One answer that ended."""

    request: SimRequest
    sent_s: float
    started_s: float
    """First admission."""
    ended_s: float
    preemptions: int
    engine: int = 0


class _Live:
    """A request inside the engine."""

    __slots__ = ("begun", "computed", "gone", "left", "offset", "preempted", "request", "sent", "todo", "tokens")

    def __init__(self, request: SimRequest, sent: float) -> None:
        self.request = request
        self.sent = sent
        self.begun = math.nan
        self.tokens = request.prompt_tokens  # to compute before the next new token
        self.left = request.output_tokens  # while decoding: the stamp of the step counter at which it ends
        self.todo = 0  # of ``tokens``, not computed yet
        self.computed = 0  # of ``tokens``, in the cache
        self.offset: int | None = None  # cached tokens less the step counter; None: not decoding
        self.preempted = 0
        self.gone = False


Noise = Callable[[], float]
"""Factor on the duration of the steps of the next second."""


class EngineSim:
    """One engine. Time moves from step end to step end; ``advance`` stops at every end of an answer.

    A lag of less than one step between ``now_s`` and the time asked for is normal.
    """

    def __init__(self, model: StepModel, limits: EngineLimits, *, noise: Noise | None = None) -> None:
        if limits.kv_tokens < limits.block_size or limits.max_num_seqs < 1:
            raise ValueError(f"an engine needs at least one KV block and one sequence, got {limits}")
        self.model, self.limits = model, limits
        self.now_s = 0.0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        """Computed for the first time."""
        self.recomputed_tokens = 0
        """Computed again after a preemption."""
        self.preemptions = 0
        self.kv_tokens = 0
        """In the cache."""
        self._blocks = limits.kv_tokens // limits.block_size
        self._free = self._blocks
        self._steps = 0  # decode steps so far: all decoding sequences advance together
        self._decoding = 0
        self._phases = [0] * limits.block_size  # decoding sequences by the step (mod block size) that needs a block
        self._ends: list[tuple[int, int, _Live]] = []  # (step of the last token, tie, who)
        self._order: list[_Live] = []  # admitted, oldest first; entries that are gone are skipped
        self._prefilling: list[_Live] = []
        self._queue: deque[_Live] = deque()
        self._arrivals: list[tuple[float, int, _Live]] = []
        self._ties = 0
        self._noise, self._factor, self._factor_until = noise, 1.0, 0.0 if noise else math.inf
        self._chunks: list[tuple[_Live, int]] = []  # prefill of the planned step
        self._plan: tuple[int, float] | None = None  # (decode steps, their end)

    @property
    def running(self) -> int:
        """Admitted sequences."""
        return self._decoding + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def load(self) -> int:
        """Requests here or on their way."""
        return self.running + len(self._queue) + len(self._arrivals)

    @property
    def kv_usage(self) -> float:
        """Used blocks over all, 0..1."""
        return 1.0 - self._free / self._blocks

    def submit(self, request: SimRequest, at_s: float | None = None) -> None:
        """Send a request at ``at_s`` (default: now); it is seen at the first step end from then on.

        Raises:
            ValueError: the cache cannot hold it, or a count is below 1.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"prompt and output need at least one token, got {request}")
        if -(-(request.prompt_tokens + request.output_tokens) // self.limits.block_size) > self._blocks:
            raise ValueError(f"{self.limits.kv_tokens} KV tokens cannot hold {request}")
        at = self.now_s if at_s is None else max(at_s, self.now_s)
        self._ties += 1
        heapq.heappush(self._arrivals, (at, self._ties, _Live(request, at)))
        if self._plan and self._plan[1] > at and not self._chunks:
            self._plan = self._bounded(self._plan[0]) if self._decoding else None

    def place(self, request: SimRequest) -> bool:
        """Put a request into the cache without computing its prompt (a run under way); False: no room."""
        live = _Live(request, self.now_s)
        blocks = -(-live.tokens // self.limits.block_size)
        if blocks > self._free or self.running >= self.limits.max_num_seqs:
            return False
        live.begun = self.now_s
        self._free -= blocks
        self.kv_tokens += live.tokens
        self._order.append(live)
        self._decode(live)
        self._plan = None
        return True

    def next_s(self) -> float:
        """End of the next step, or of the jump to the next event; infinite when idle."""
        if self._plan is None:
            self._plan = self._schedule()
        return self._plan[1]

    def advance(self, until_s: float) -> list[Finished]:
        """Do the steps that end by ``until_s``; stop earlier at the first end of an answer."""
        while True:
            end = self.next_s()
            if not self.running:
                if end > until_s:
                    self.now_s = max(self.now_s, until_s)
                    return []
                self.now_s, self._plan = end, None  # idle until the next arrival
                continue
            steps = self._plan[0] if self._plan else 1
            if end > until_s:
                steps = self._steps_by(until_s) if steps > 1 else 0
                if steps == 0:
                    return []
            finished = self._take(steps)
            if finished:
                return finished

    def _schedule(self) -> tuple[int, float]:
        """Preempt and admit for the step that begins now; how far to jump, and to when."""
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            self._queue.append(heapq.heappop(self._arrivals)[2])
        if self._noise and self.now_s >= self._factor_until:
            self._factor, self._factor_until = self._noise(), self.now_s + NOISE_EVERY_S
        preempted = self._make_room()
        self._chunks = []
        budget = self.limits.max_num_batched_tokens - self._decoding
        for live in self._prefilling:
            budget = self._chunk(live, budget)
        while self._queue and budget > 0 and not preempted and self._admit(self._queue[0]):
            budget = self._chunk(self._prefilling[-1], budget)
        if self._chunks or self._prefilling:
            tokens = sum(size for _, size in self._chunks)
            duration = self.model.step_s(self._decoding, self.kv_tokens, tokens) * self._factor
            return 1, self.now_s + duration
        if not self._decoding:
            return 0, self._arrivals[0][0] if self._arrivals else math.inf
        # With a queue whose head was held back by a preemption only, the next step may admit it.
        steps = 1 if preempted and self._queue else self._ends_in()
        return self._bounded(min(steps, self._steps_with_room()))

    def _bounded(self, steps: int) -> tuple[int, float]:
        """Not past the next arrival or change of the noise."""
        if steps > 1 and self._arrivals:
            steps = min(steps, self._steps_until(self._arrivals[0][0]))
        if steps > 1 and self._factor_until < math.inf:
            steps = min(steps, self._steps_until(self._factor_until))
        return steps, self.now_s + self._duration(steps)

    def _duration(self, steps: int) -> float:
        first = self.model.step_s(self._decoding, self.kv_tokens)
        growth = self.model.kv_token_s * self._decoding * steps * (steps - 1) / 2
        return (steps * first + growth) * self._factor

    def _steps_until(self, at_s: float) -> int:
        """Decode steps until the first step end at or after ``at_s``, at least one."""
        return max(1, math.ceil(self._steps_in(at_s - self.now_s) - 1e-9))

    def _steps_by(self, at_s: float) -> int:
        """Decode steps that end by ``at_s``."""
        return math.floor(self._steps_in(at_s - self.now_s) + 1e-9)

    def _steps_in(self, seconds: float) -> float:
        """Solves ``_duration(k) = seconds``, without cancellation where the growth is small."""
        bend = self.model.kv_token_s * self._decoding / 2
        slope = self.model.step_s(self._decoding, self.kv_tokens) - bend
        time = max(0.0, seconds / self._factor)
        if slope <= 0:
            return 1.0
        return 2 * time / (slope + math.sqrt(slope * slope + 4 * bend * time))

    def _ends_in(self) -> int:
        while self._ends[0][2].left != self._ends[0][0] or self._ends[0][2].offset is None:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def _steps_with_room(self) -> int:
        """Decode steps that the free blocks allow; at least one, since room was made for it."""
        size = self.limits.block_size
        rounds, free = divmod(self._free, self._decoding)
        steps = rounds * size
        for i in range(size):
            free -= self._phases[(self._steps + i) % size]
            if free < 0:
                break
            steps += 1
        return max(1, steps)

    def _make_room(self) -> bool:
        """Preempt the newest until the next decode step finds its blocks."""
        phase = self._steps % self.limits.block_size
        before = self.preemptions
        while self._phases[phase] > self._free:
            live = self._order.pop()
            if live.gone:
                continue
            self._leave(live)
            live.preempted += 1
            self.preemptions += 1
            self._queue.appendleft(live)
        return self.preemptions > before

    def _leave(self, live: _Live) -> None:
        """Take a sequence out of the cache."""
        size = self.limits.block_size
        if live.offset is None:
            self._prefilling.remove(live)
            self.kv_tokens -= live.computed
            self._free += -(-live.tokens // size)
            return
        cached = live.offset + self._steps
        self._phases[-live.offset % size] -= 1
        self._decoding -= 1
        self.kv_tokens -= cached
        self._free += -(-cached // size)
        live.left -= self._steps
        live.tokens = cached + 1  # the last token written is not in the cache yet
        live.offset = None

    def _admit(self, live: _Live) -> bool:
        blocks = -(-live.tokens // self.limits.block_size)
        taken = self._phases[self._steps % self.limits.block_size]  # by the decoding ones in this step
        if blocks > self._free - taken or self.running >= self.limits.max_num_seqs:
            return False
        self._queue.popleft()
        self._free -= blocks
        hit = int(live.tokens * self.limits.hit_share) if live.preempted else 0
        live.computed = min(hit, live.tokens - 1)
        live.todo = live.tokens - live.computed
        self.kv_tokens += live.computed
        if math.isnan(live.begun):
            live.begun = self.now_s
        self._prefilling.append(live)
        self._order.append(live)
        return True

    def _chunk(self, live: _Live, budget: int) -> int:
        size = min(live.todo, budget)
        if size > 0:
            self._chunks.append((live, size))
        return budget - max(0, size)

    def _decode(self, live: _Live) -> None:
        """The prompt is in the cache: decode from the next step on."""
        live.offset = live.tokens - self._steps
        live.left += self._steps
        self._decoding += 1
        self._phases[-live.offset % self.limits.block_size] += 1
        self._ties += 1
        heapq.heappush(self._ends, (live.left, self._ties, live))

    def _take(self, steps: int) -> list[Finished]:
        """Do the planned step (with its prefill), or so many decode steps."""
        if self._plan is None:
            raise RuntimeError("nothing is planned")
        self.now_s = self._plan[1] if steps == self._plan[0] else self.now_s + self._duration(steps)
        self._plan = None
        size, decoding = self.limits.block_size, self._decoding
        rounds, rest = divmod(steps, size)
        self._free -= rounds * decoding + sum(self._phases[(self._steps + i) % size] for i in range(rest))
        self._steps += steps
        self.kv_tokens += steps * decoding
        self.generated_tokens += steps * decoding
        finished: list[Finished] = []
        if decoding:
            while self._ends and self._ends[0][0] <= self._steps:
                stamp, _, live = heapq.heappop(self._ends)
                if live.offset is not None and live.left == stamp:
                    finished.append(self._finish(live))
        if self._chunks:
            finished += self._prefilled()
        return finished

    def _prefilled(self) -> list[Finished]:
        finished = []
        for live, size in self._chunks:
            live.todo -= size
            live.computed += size
            self.kv_tokens += size
            if live.preempted:
                self.recomputed_tokens += size
            else:
                self.prompt_tokens += size
            if live.todo == 0:
                self._prefilling.remove(live)
                live.left -= 1  # the step that completes a prompt writes a token
                self.generated_tokens += 1
                self._decode(live)
                if live.left == self._steps:
                    finished.append(self._finish(live))
        self._chunks = []
        return finished

    def _finish(self, live: _Live) -> Finished:
        self._leave(live)
        live.gone = True
        if len(self._order) > 64 and len(self._order) > 2 * self.running:
            self._order = [other for other in self._order if not other.gone]
        return Finished(
            request=live.request,
            sent_s=live.sent,
            started_s=live.begun,
            ended_s=self.now_s,
            preemptions=live.preempted,
        )
