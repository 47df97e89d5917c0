"""KV cache capacity from start-up lines: one value an engine process, summed over the engines of one server."""

from __future__ import annotations

import re

from autotune.engines.logline import LogLine

# `GPU KV cache size: 1,192,160 tokens` (V1; the device may be CPU or XPU), `# GPU blocks: 2987, # CPU blocks: ..` (V0).
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_BLOCKS = re.compile(r"# \w+ blocks: (\d+)")
_BLOCK_SIZE = re.compile(r"\bblock_size=(\d+)")
_ENGINE_START = re.compile(r"Initializing an? (?:V1 )?LLM engine")
_RANK = re.compile(r"_DP(\d+)")


class KvLines:
    """Collects the lines of the newest server that printed any.

    Workers of one engine repeat its line, and where they differ the smallest is what the engine can use. Lines
    that name their process are told apart by it; those that do not are shared out evenly among the engines that
    were started.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, list[int]] = {}
        self._starts: dict[str, int] = {}
        self._block_size: int | None = None
        self._over = False
        """What comes next belongs to another server."""

    @property
    def tokens(self) -> int | None:
        """Tokens, summed over engines; ``None``: the log does not say."""
        if not self._sizes:
            return None
        return sum(_engine_sum(sizes, self._starts.get(name, 1)) for name, sizes in self._sizes.items())

    def server_started(self) -> None:
        """A banner was printed: the values so far are of an earlier server."""
        self._over = bool(self._sizes)
        self._starts = {} if not self._sizes else self._starts
        self._block_size = None

    def take(self, line: LogLine) -> None:
        """Look at a line."""
        text = line.text
        if match := _BLOCK_SIZE.search(text):
            self._block_size = int(match[1])
        if _ENGINE_START.search(text):
            self._begin_if_over(engine_starts=True)
            name = _process(line)
            self._starts[name] = self._starts.get(name, 0) + 1
        elif match := _TOKENS.search(text):
            self._add(line, int(match[1].replace(",", "") or 0))
        elif (match := _BLOCKS.search(text)) and self._block_size is not None:
            self._add(line, int(match[1]) * self._block_size)

    def _add(self, line: LogLine, tokens: int) -> None:
        self._begin_if_over(engine_starts=False)
        sizes = self._sizes.setdefault(_process(line), [])
        if len(sizes) < 4096:
            sizes.append(tokens)

    def _begin_if_over(self, *, engine_starts: bool) -> None:
        """An engine that starts after sizes were printed is a new server's: engines of one server start together."""
        if self._over or (engine_starts and self._sizes):
            self._sizes, self._starts, self._over = {}, {}, False


def _process(line: LogLine) -> str:
    """The engine process a line belongs to; workers are named by their data-parallel rank, if any."""
    name = line.procs[-1] if line.procs else ""
    outside = " ".join((line.front.service, *line.procs[:-1]))
    if "Worker" in name:
        rank = _RANK.search(name)
        name = f"worker of rank {rank[1]}" if rank else "worker"
    return f"{outside} {name}".strip()


def _engine_sum(sizes: list[int], engines: int) -> int:
    """Sum over engines of the smallest of each, for lines of so many engines that cannot be told apart."""
    if engines <= 1 or len(sizes) % engines:
        return min(sizes)
    each = len(sizes) // engines
    return sum(min(sizes[i * each : (i + 1) * each]) for i in range(engines))
