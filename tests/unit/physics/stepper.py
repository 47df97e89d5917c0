"""An exact continuous-batching engine, one step at a time: the reference for the event-jump simulator.

Written from vLLM's scheduler rules, with none of the simulator's code: every sequence holds a list of block
sizes' worth of tokens, every step walks over every sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Sequence:
    number: int
    prompt: int
    output: int
    written: int = 0
    cached: int = 0
    blocks: int = 0
    target: int = 0
    decoding: bool = False
    preempted: bool = False
    ended_s: float = math.nan


@dataclass
class Stepper:
    step_s: Callable[[int, int, int], float]
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block: int = 16
    hit_share: float = 0.0
    now: float = 0.0
    preemptions: int = 0
    generated: int = 0
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.free = self.kv_tokens // self.block

    def preempt_last(self) -> None:
        victim = self.running.pop()
        self.free += victim.blocks
        victim.blocks = victim.cached = 0
        victim.decoding, victim.preempted = False, True
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def step(self) -> list[Sequence]:
        """One step; the sequences that end with it."""
        preempted = False
        budget = self.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.decoding:
                while math.ceil((sequence.cached + 1) / self.block) > sequence.blocks and self.free == 0:
                    self.preempt_last()
                    preempted = True
                    if index >= len(self.running):
                        break
                if index >= len(self.running):
                    break
                if math.ceil((sequence.cached + 1) / self.block) > sequence.blocks:
                    sequence.blocks += 1
                    self.free -= 1
                work.append((sequence, 1))
                budget -= 1
            else:
                size = min(budget, sequence.target - sequence.cached)
                budget -= size
                work.append((sequence, size))
            index += 1
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            target = sequence.prompt + sequence.written
            need = math.ceil(target / self.block)
            if need > self.free:
                break
            self.waiting.popleft()
            sequence.target, sequence.blocks = target, need
            self.free -= need
            sequence.cached = min(int(target * self.hit_share), target - 1) if sequence.preempted else 0
            size = min(budget, target - sequence.cached)
            budget -= size
            self.running.append(sequence)
            work.append((sequence, size))
        work = [(s, size) for s, size in work if s in self.running and size > 0]
        decoders = sum(s.decoding for s, _ in work)
        prefill = sum(size for s, size in work if not s.decoding)
        self.now += self.step_s(decoders, sum(s.cached for s in self.running), prefill)
        for sequence, size in work:
            sequence.cached += size
            if sequence.decoding or sequence.cached == sequence.target:
                sequence.decoding = True
                sequence.written += 1
                self.generated += 1
        ended = [s for s in self.running if s.written == s.output]
        for sequence in ended:
            self.running.remove(sequence)
            self.free += sequence.blocks
            sequence.ended_s = self.now
        return ended


def run(stepper: Stepper, lengths: list[tuple[int, int]], concurrency: int) -> list[Sequence]:
    """All (prompt, output) pairs through a closed loop; the sequences in the order of their ends."""
    todo = deque(Sequence(i, p, o) for i, (p, o) in enumerate(lengths))
    done: list[Sequence] = []
    while len(done) < len(lengths):
        while todo and len(stepper.running) + len(stepper.waiting) < concurrency:
            stepper.waiting.append(todo.popleft())
        done += stepper.step()
    return done
