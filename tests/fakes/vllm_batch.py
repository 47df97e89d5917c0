"""Batch model of the fake server: continuous batching, a KV cache in blocks, preemption by recompute; in real time."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

BLOCK = 16


@dataclass(frozen=True)
class Speed:
    """One step takes ``t0 + per_sequence*b + per_kv_token*KV + per_prefill_token*p`` seconds."""

    t0: float = 2e-3
    per_sequence: float = 5e-5
    per_kv_token: float = 1e-8
    per_prefill_token: float = 2e-6


@dataclass(eq=False)
class Sequence:
    """One request inside an engine."""

    prompt: Tokens[int]
    limit: int
    """Output tokens after which it ends."""
    finish: str
    salt: str = ""
    done: int = 0
    computed: bool = False
    cancelled: bool = False
    tokens: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    """One word for each token; ``None`` is the end."""

    @property
    def blocks(self) -> int:
        return math.ceil((len(self.prompt) + self.done + 1) / BLOCK)


@dataclass
class Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Engine:
    """One data-parallel rank."""

    def __init__(self, *, kv_tokens: int, max_num_seqs: int, speed: Speed, prefix_caching: bool) -> None:
        self.blocks = kv_tokens // BLOCK
        self.max_num_seqs = max_num_seqs
        self.speed = speed
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.counters = Counters()
        self.hung = False
        self._prefix_caching = prefix_caching
        self._seen: set[int] = set()
        self._work = asyncio.Event()

    @property
    def kv_usage(self) -> float:
        return min(1.0, sum(s.blocks for s in self.running) / self.blocks)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._work.set()

    def abort(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        self._work.set()

    def forget_prefixes(self) -> None:
        self._seen.clear()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if self.hung or not (self.running or self.waiting):
                self._work.clear()
                await self._work.wait()
                due = clock()
                if self.hung:
                    continue
            prefill = self._schedule()
            speed = self.speed
            kv = sum(len(s.prompt) + s.done for s in self.running)
            due += (
                speed.t0
                + speed.per_sequence * len(self.running)
                + speed.per_kv_token * kv
                + speed.per_prefill_token * prefill
            )
            await asyncio.sleep(max(0.0, due - clock()))
            due = max(due, clock() - 0.05)
            self._step()

    def _schedule(self) -> int:
        """Drop what was given up, admit what fits; returns the tokens to prefill."""
        for gone in [s for s in (*self.running, *self.waiting) if s.cancelled]:
            (self.running if gone in self.running else self.waiting).remove(gone)
            self.counters.finished["abort"] += 1
        while sum(s.blocks for s in self.running) > self.blocks and len(self.running) > 1:
            newest = self.running.pop()
            newest.computed = False
            self.waiting.appendleft(newest)
            self.counters.preemptions += 1
        prefill = 0
        free = self.blocks - sum(s.blocks for s in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting[0]
            if first.blocks > free and self.running:
                break
            free -= first.blocks
            self.waiting.popleft()
            self.running.append(first)
            prefill += self._compute(first)
        return prefill

    def _compute(self, sequence: Sequence) -> int:
        """Prefill of one sequence; its prompt is counted once, its prefix may be cached."""
        hits = self._cached(sequence) if self._prefix_caching else 0
        if sequence.done == 0:
            self.counters.prompt_tokens += len(sequence.prompt)
            if self._prefix_caching:
                self.counters.prefix_queries += len(sequence.prompt)
                self.counters.prefix_hits += hits
        sequence.computed = True
        return len(sequence.prompt) + sequence.done - hits

    def _cached(self, sequence: Sequence) -> int:
        key, hits, unbroken = hash(sequence.salt), 0, True
        for start in range(0, len(sequence.prompt) - BLOCK, BLOCK):
            key = hash((key, tuple(sequence.prompt[start : start + BLOCK])))
            unbroken = unbroken and key in self._seen
            hits += BLOCK if unbroken else 0
            self._seen.add(key)
        return hits

    def _step(self) -> None:
        for sequence in list(self.running):
            sequence.done += 1
            self.counters.generation_tokens += 1
            sequence.tokens.put_nowait(f" w{sequence.done}")
            if sequence.done >= sequence.limit:
                self.running.remove(sequence)
                self.counters.finished[sequence.finish] += 1
                sequence.tokens.put_nowait(None)


def natural_length(prompt: Tokens[int], mean: float) -> int:
    """How long an answer is that may end by itself: lognormal, the same for the same prompt."""
    seed = hashlib.sha256(repr(list(prompt)).encode()).digest()
    return max(1, round(mean * math.exp(random.Random(seed).gauss(-0.32, 0.8))))
