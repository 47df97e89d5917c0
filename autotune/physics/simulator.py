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

from autotune.physics.kv_blocks import KvBlocks
from autotune.physics.sim_records import NOISE_EVERY_S, EngineLimits, Finished, Live, Noise, SimRequest
from autotune.physics.steptime import StepModel

__all__ = ["EngineLimits", "EngineSim", "Finished", "Noise", "SimRequest"]


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
        self._blocks = KvBlocks(limits.kv_tokens, limits.block_size)
        self._steps = 0  # decode steps so far: all decoding sequences advance together
        self._decoding = 0
        self._ends: list[tuple[int, int, Live]] = []  # (step of the last token, tie, who)
        self._order: list[Live] = []  # admitted, oldest first; entries that are gone are skipped
        self._prefilling: list[Live] = []
        self._queue: deque[Live] = deque()
        self._arrivals: list[tuple[float, int, Live]] = []
        self._ties = 0
        self._noise, self._factor, self._factor_until = noise, 1.0, 0.0 if noise else math.inf
        self._chunks: list[tuple[Live, int]] = []  # prefill of the planned step
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
        return self._blocks.usage

    def submit(self, request: SimRequest, at_s: float | None = None) -> None:
        """Send a request at ``at_s`` (default: now); it is seen at the first step end from then on.

        Raises:
            ValueError: the cache cannot hold it, or a count is below 1.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"prompt and output need at least one token, got {request}")
        if self._blocks.of(request.prompt_tokens + request.output_tokens) > self._blocks.total:
            raise ValueError(f"{self.limits.kv_tokens} KV tokens cannot hold {request}")
        at = self.now_s if at_s is None else max(at_s, self.now_s)
        self._ties += 1
        heapq.heappush(self._arrivals, (at, self._ties, Live(request, at)))
        if self._plan and self._plan[1] > at and not self._chunks:
            self._plan = self._bounded(self._plan[0]) if self._decoding else None

    def place(self, request: SimRequest) -> bool:
        """Put a request into the cache without computing its prompt (a run under way); False: no room."""
        live = Live(request, self.now_s)
        blocks = self._blocks.of(live.tokens)
        whole = self._blocks.of(request.prompt_tokens + request.output_tokens)
        if blocks > self._blocks.free or whole > self._blocks.total or self.running >= self.limits.max_num_seqs:
            return False
        live.begun = self.now_s
        self._blocks.free -= blocks
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
            again = self.limits.recompute_factor
            tokens = sum(size * again if live.preempted else size for live, size in self._chunks)
            duration = self.model.step_s(self._decoding, self.kv_tokens, tokens) * self._factor
            return 1, self.now_s + duration
        if not self._decoding:
            return 0, self._arrivals[0][0] if self._arrivals else math.inf
        # With a queue whose head was held back by a preemption only, the next step may admit it.
        steps = 1 if preempted and self._queue else self._ends_in()
        return self._bounded(min(steps, self._blocks.steps_with_room(self._steps, self._decoding)))

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

    def _make_room(self) -> bool:
        """Preempt the newest until the next decode step finds its blocks."""
        before = self.preemptions
        while self._blocks.needed(self._steps) > self._blocks.free:
            live = self._order.pop()
            if live.gone:
                continue
            self._leave(live)
            live.preempted += 1
            self.preemptions += 1
            self._queue.appendleft(live)
        return self.preemptions > before

    def _leave(self, live: Live) -> None:
        """Take a sequence out of the cache."""
        if live.offset is None:
            self._prefilling.remove(live)
            self.kv_tokens -= live.computed
            self._blocks.free += self._blocks.of(live.tokens)
            return
        cached = live.offset + self._steps
        self._blocks.leave(live.offset)
        self._decoding -= 1
        self.kv_tokens -= cached
        self._blocks.free += self._blocks.of(cached)
        live.left -= self._steps
        live.tokens = cached + 1  # the last token written is not in the cache yet
        live.offset = None

    def _admit(self, live: Live) -> bool:
        blocks = self._blocks.of(live.tokens)
        taken = self._blocks.needed(self._steps)  # by the decoding ones in this step
        if blocks > self._blocks.free - taken or self.running >= self.limits.max_num_seqs:
            return False
        self._queue.popleft()
        self._blocks.free -= blocks
        hit = int(live.tokens * self.limits.hit_share) if live.preempted else 0
        live.computed = min(hit, live.tokens - 1)
        live.todo = live.tokens - live.computed
        self.kv_tokens += live.computed
        if math.isnan(live.begun):
            live.begun = self.now_s
        self._prefilling.append(live)
        self._order.append(live)
        return True

    def _chunk(self, live: Live, budget: int) -> int:
        size = min(live.todo, budget)
        if size > 0:
            self._chunks.append((live, size))
        return budget - max(0, size)

    def _decode(self, live: Live) -> None:
        """The prompt is in the cache: decode from the next step on."""
        live.offset = live.tokens - self._steps
        live.left += self._steps
        self._decoding += 1
        self._blocks.join(live.offset)
        self._ties += 1
        heapq.heappush(self._ends, (live.left, self._ties, live))

    def _take(self, steps: int) -> list[Finished]:
        """Do the planned step (with its prefill), or so many decode steps."""
        if self._plan is None:
            raise RuntimeError("nothing is planned")
        self.now_s = self._plan[1] if steps == self._plan[0] else self.now_s + self._duration(steps)
        self._plan = None
        decoding = self._decoding
        if decoding:
            self._blocks.grow(self._steps, steps, decoding)
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

    def _finish(self, live: Live) -> Finished:
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
