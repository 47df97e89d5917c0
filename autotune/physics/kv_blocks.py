"""KV blocks of one engine, counted exactly over many decode steps at once.

All decoding sequences grow by a token a step, so each needs a new block every ``size`` steps, at a step that
depends on its length alone: sequences are counted by that phase, and the need of any number of steps is a sum
over at most ``size`` phases.
"""

from __future__ import annotations


class KvBlocks:
    """Free blocks, and the decoding sequences by the step (modulo the block size) that needs a block."""

    __slots__ = ("free", "phases", "size", "total")

    def __init__(self, tokens: int, size: int) -> None:
        self.size = size
        self.total = tokens // size
        self.free = self.total
        self.phases = [0] * size

    @property
    def usage(self) -> float:
        """Used over all, 0..1."""
        return 1.0 - self.free / self.total

    def of(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.size)

    def join(self, offset: int) -> None:
        """A sequence decodes from now on; ``offset``: its cached tokens less the step counter."""
        self.phases[-offset % self.size] += 1

    def leave(self, offset: int) -> None:
        """A decoding sequence stops."""
        self.phases[-offset % self.size] -= 1

    def needed(self, step: int) -> int:
        """Blocks that the decode step number ``step`` takes."""
        return self.phases[step % self.size]

    def grow(self, step: int, steps: int, decoding: int) -> None:
        """Take the blocks of so many decode steps from ``step`` on."""
        rounds, rest = divmod(steps, self.size)
        self.free -= rounds * decoding
        for i in range(rest):
            self.free -= self.phases[(step + i) % self.size]

    def steps_with_room(self, step: int, decoding: int) -> int:
        """Decode steps from ``step`` on that the free blocks allow; at least one, room was made for it."""
        rounds, free = divmod(self.free, decoding)
        steps = rounds * self.size
        for i in range(self.size):
            free -= self.phases[(step + i) % self.size]
            if free < 0:
                break
            steps += 1
        return max(1, steps)
