"""A server's log -> what it says of load, capacity and end; streamed, so that a log of any size can be read.

Only lines that hold one of a few byte strings are looked at. Memory does not grow with the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from autotune.engines.diagnosis import Diagnosis
from autotune.engines.kvlines import KvLines
from autotune.engines.lastwords import BANNER
from autotune.engines.loadlines import NewestLines, PeakRate
from autotune.engines.logline import LINE_LIMIT, LogLine, parse, shorten, unbroken
from autotune.engines.logsummary import LastStats, LogSummary, log_failure
from autotune.engines.statsline import Clock, Glance, StatsLine, glance, read_prefix_hit_rate, read_stats
from autotune.errors import InputError
from autotune.records.observation import Failure

CHUNK = 1 << 20
"""Bytes that are read at once."""

_NEEDLES = (
    b"throughput: ",
    b" version ",
    b"KV cache size",
    b" blocks: ",
    b"block_size=",
    b"LLM engine (v",
    b"hit rate: GPU",
    b"rror",
    b"xception",
    b"Starting vLLM",
    b"pplication ",
    b"hut",
    b"server process",
    b"died",
    b"kill",
    b"Kill",
    b"fatal signal",
    b"ailed",
    b"Aborted",
    b"Seg",
    b"KeyboardInterrupt",
    b"gated repo",
    b"terminate called",
    b"Watchdog",
)
"""A line without any of these says nothing that is read here."""
_INFO = re.compile(rb'INFO(?:\x1b\[[\d;]*m)? (?:\x1b\[[\d;]*m)?\d\d-\d\d \d\d:|"levelname": ?"INFO"')
"""vLLM went on after an error."""
_ANSWERED = re.compile(rb'"(?:GET|POST) /[^"]*" 200')
"""HTTP is up."""
_REQUEST = re.compile(rb"\] (?:Received request|Added request|Generated response) ")
QUOTING = 400
"""A line of so many bytes may quote what a user wrote; if its beginning says so, it is passed over."""
_VERSION = re.compile(
    r"vLLM (?:API )?server version ([^\s,]+)|LLM engine \(v([^)\s]+)\)|^[^A-Za-z]*\bversion v?(\d+\.\d+\S*)$"
)


class LogReader:
    """Reads a log as it comes: ``feed`` chunks cut anywhere, look at the properties at any time."""

    def __init__(self) -> None:
        self.vllm_version: str | None = None
        self.samples = 0
        self._max_kv_usage: float | None = None
        self._rest = b""
        self._last_line = b""
        self._server = 0
        self._seen = False
        self._diagnosis = Diagnosis()
        self._kv = KvLines()
        self._newest = NewestLines()
        self._peak = PeakRate()

    def feed(self, chunk: bytes) -> list[Glance]:
        """Take the next bytes; returns the stats lines that they complete (``statsline.read_stats`` reads them)."""
        data = self._rest + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = shorten(data[end:])
        return self._read(data[:end]) if end else []

    def close(self) -> list[Glance]:
        """The log has ended: take its last line although no line end follows."""
        rest, self._rest = self._rest, b""
        return self._read(rest)

    @property
    def ready(self) -> bool:
        """The last server has said that it is ready, or serves."""
        return self._diagnosis.ready

    @property
    def kv_capacity_tokens(self) -> int | None:
        """KV cache of the last server that printed it, summed over engines."""
        return self._kv.tokens

    @property
    def engines(self) -> int:
        """Engines in the stats lines of the last server that printed any."""
        return sum(line.engines for line in self._newest.lines)

    @property
    def max_kv_usage(self) -> float | None:
        """Largest KV use of any stats line, 0..1."""
        return None if self._max_kv_usage is None else round(self._max_kv_usage, 9)

    @property
    def peak_output_tokens_per_s(self) -> float | None:
        """Largest sum over engines at one time stamp."""
        return self._peak.value

    @property
    def last(self) -> LastStats | None:
        """The newest line of each engine, put together."""
        lines = self._newest.lines
        if not lines:
            return None
        rates = [line.prefix_hit_rate for line in lines if line.prefix_hit_rate is not None]
        return LastStats(
            prompt_tokens_per_s=round(sum(line.prompt_tokens_per_s for line in lines), 6),
            output_tokens_per_s=round(sum(line.output_tokens_per_s for line in lines), 6),
            running=_sum([line.running for line in lines]),
            waiting=_sum([line.waiting for line in lines]),
            kv_usage=max(line.kv_usage for line in lines),
            prefix_hit_rate=round(sum(rates) / len(rates), 9) if rates else None,
            preemptions=_sum([line.preemptions for line in lines]),
        )

    def failure(self, *, exit_code: int | None = None, ready: bool | None = None) -> Failure | None:
        """What ended the last server; see ``diagnosis.diagnose``."""
        for line in parse(self._last_line):
            self._diagnosis.last_text = line.text.strip()
        return self._diagnosis.failure(exit_code=exit_code, ready=ready)

    def summary(self, file: str) -> LogSummary:
        """Everything together."""
        failure = self.failure()
        return LogSummary(
            file=file,
            vllm_version=self.vllm_version,
            engines=self.engines,
            samples=self.samples,
            last=self.last,
            peak_output_tokens_per_s=self.peak_output_tokens_per_s,
            max_kv_usage=self.max_kv_usage,
            kv_capacity_tokens=self.kv_capacity_tokens,
            failure=None if failure is None else log_failure(failure),
        )

    def _read(self, data: bytes) -> list[Glance]:
        """Read complete lines."""
        data = unbroken(data)
        found: list[Glance] = []
        done = 0
        for start in _noteworthy(data):
            self._settle(data, done, start)
            end = data.find(b"\n", start)
            done = len(data) if end < 0 else end
            if done - start > QUOTING and _REQUEST.search(data, start, start + QUOTING):
                continue
            for line in parse(data[start:done]):
                if (stats := self._take(line)) is not None:
                    found.append(stats)
        self._settle(data, done, len(data))
        written = data.rstrip()
        self._last_line = written[written.rfind(b"\n") + 1 :][:LINE_LIMIT] or self._last_line
        return found

    def _settle(self, data: bytes, start: int, end: int) -> None:
        """Between noteworthy lines: those that show that vLLM went on, if that is in question."""
        if not self._diagnosis.watching:
            return
        matches = (pattern.search(data, start, end) for pattern in (_INFO, _ANSWERED))
        for at in sorted(match.start() for match in matches if match is not None):
            stop = data.find(b"\n", at)
            for line in parse(data[data.rfind(b"\n", 0, at) + 1 : len(data) if stop < 0 else stop]):
                self._diagnosis.feed(line)

    def _take(self, line: LogLine) -> Glance | None:
        seen = glance(line, self._server)
        if seen is None:
            self._diagnosis.feed(line)
            self._take_other(line)
            return None
        self._diagnosis.feed_stats(line, seen.output_tokens_per_s)
        self._seen = True
        self.samples += 1
        self._newest.add(seen)
        self._peak.add(seen)
        if self._max_kv_usage is None or seen.kv_usage > self._max_kv_usage:
            self._max_kv_usage = seen.kv_usage
        return seen

    def _take_other(self, line: LogLine) -> None:
        if line.ours and (match := _VERSION.search(line.text)):
            self.vllm_version = match[1] or match[2] or match[3]
            if BANNER.match(line.text):
                self._server += 1 if self._seen else 0
                self._seen = True
                self._kv.server_started()
                self._newest.server_started()
        self._kv.take(line)
        if line.text.startswith("Prefix cache hit rate: GPU"):
            self._newest.add_hit_rate(read_prefix_hit_rate(line.text))


def read_log(path: Path) -> LogSummary:
    """Read a whole log.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    reader = LogReader()
    for _ in _read_file(path, reader):
        pass
    return reader.summary(str(path))


def iter_samples(path: Path) -> Iterator[StatsLine]:
    """The stats lines of a log, in its order; memory does not grow with the log.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    clock = Clock()
    for lines in _read_file(path, LogReader()):
        for line in lines:
            yield read_stats(line, clock)


def _read_file(path: Path, reader: LogReader) -> Iterator[list[Glance]]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield reader.feed(chunk)
        yield reader.close()
    except OSError as error:
        raise InputError(
            f"cannot read the log {path}: {error.strerror or error}", hint="give the file that the server wrote"
        ) from error


def _noteworthy(data: bytes) -> list[int]:
    """Where the lines start that hold a needle, in order."""
    starts = set()
    for needle in _NEEDLES:
        at = data.find(needle)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            end = data.find(b"\n", at)
            at = -1 if end < 0 else data.find(needle, end)
    return sorted(starts)


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
