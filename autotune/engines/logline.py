"""One physical line of a server's log -> who wrote it, when, how loud, and what it says.

Logs reach us through terminals, journald, docker compose, kubectl, Slurm, Ray and JSON formatters; all of them
put something in front of what vLLM printed. ``parse`` takes that apart and never raises.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

LINE_LIMIT = 1 << 20
"""Bytes of one line that are looked at; the rest is dropped (a binary file must not fill the memory)."""
JSON_WITHIN = 200
"""A JSON object begins within so many characters of its line, after prefixes."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_NULS = re.compile(rb"\x00{2,}")
_LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
# vLLM's own head: `INFO 05-12 02:45:15 [core.py:93] `, in V0 `INFO 03-19 06:27:09 api_server.py:528] `.
_HEAD = re.compile(rf"({_LEVELS}) (\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? \[?([^\s\]:]+):\d+\]?(?: |$)")
# A process of vLLM or Ray: `(EngineCore_DP0 pid=41) `, `(VllmWorker rank=1 pid=7) `, `(pid=7, ip=10.0.0.2) `.
_PROC = re.compile(r"\((?:(?P<name>[\w.:= -]*?)[ ]?)pid=(?P<pid>\d+)[^()]*\)\s*")
# What transports put in front: quote marks, `^C`, service names, journald, ISO times, CRI, srun, torchrun, mpirun.
_PREFIX = re.compile(
    r"(?:>\s|\^C|(?:\d+\|)?(?P<compose>[\w.@/-]+)\s+[|│] |\[(?P<pod>pod/[^\]]+)\]\s+"
    r"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?[\w.-]+ [\w@./-]+\[\d+\]: "
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\s?[+-]\d\d:?\d\d)?\]?:?\s+"
    rf"(?:\|\s(?!\s*(?:{_LEVELS})\s*\|))?"
    r"|(?:stdout|stderr) [FP] |\[(?:rank|default)\d+\]:? ?|\[\d+,\d+\]<\w+>:\s?|\d{1,4}: )"
)
# A level in the ways of others: uvicorn, brackets, std logging, loguru.
_LEVEL = re.compile(
    rf"(?:\[?(?P<a>{_LEVELS})\]?:?\s+|-?\s*[\w.]+ - (?P<b>{_LEVELS}) - "
    rf"|\|\s*(?P<c>{_LEVELS})\s*\|\s*|(?P<d>{_LEVELS}):[\w.]+:)"
)
# glog, as PyTorch's C++ prints: `[W301 17:37:32.70 ProcessGroupNCCL.cpp:1524] `, `E0716 18:21:22.79 1 a.py:8] `.
_GLOG = re.compile(r"\[?(?P<letter>[EWIF])(?:\d{3,4} [\d:.]+)?(?: \d+)? [^\]\s]+:\d+\] ")
_GLOG_LEVELS = {"E": "ERROR", "F": "ERROR", "W": "WARNING", "I": "INFO"}
_VLLM_PROC = re.compile(r"(?:\w*APIServer|\w*ApiServer|EngineCore|DPEngineCore|\w*Worker|RayWorker|DPCoordinator)")
_API_PROC = re.compile(r"(?:APIServer|ApiServer)")
_JSON_MESSAGES = ("message", "log", "msg", "MESSAGE")
_JSON_LEVELS = ("levelname", "level", "severity")
_ISO_STAMP = re.compile(r"\d{4}-(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")


class Front(NamedTuple):
    """What stands in front of a line: who wrote it."""

    procs: tuple[str, ...] = ()
    """Processes named, outermost first: ``APIServer pid=7``."""
    service: str = ""
    """Compose service or pod, where named."""
    interrupted: bool = False
    """A terminal echoed ``^C`` in front of what was printed."""
    from_api: bool = False
    """Printed by an API server process."""
    from_engine: bool = False
    """Printed by an engine or worker process."""
    source: str = ""
    """Service and innermost process: what tells writers of the same words apart."""


class LogLine(NamedTuple):
    """One line of a log, taken apart."""

    text: str
    """The message as printed: without ANSI codes, prefixes and head."""
    level: str | None = None
    """``DEBUG`` to ``CRITICAL``; ``None``: printed without a level."""
    stamp: str | None = None
    """``MM-DD HH:MM:SS`` of vLLM's head."""
    file: str | None = None
    """Source file in vLLM's head."""
    front: Front = Front()

    @property
    def procs(self) -> tuple[str, ...]:
        """Processes named in front."""
        return self.front.procs

    @property
    def ours(self) -> bool:
        """A process name or head in front says that vLLM printed it."""
        return self.stamp is not None or self.front.from_api or self.front.from_engine


def unbroken(data: bytes) -> bytes:
    """Data whose lines end with LF only: CR and holes of NULs end a line, too; single NULs (UTF-16) are dropped."""
    data = data.replace(b"\r", b"\n")
    return _NULS.sub(b"\n", data).replace(b"\0", b"") if b"\0" in data else data


def shorten(line: bytes) -> bytes:
    """An unfinished line within the limit: a hole of NULs counts little, what is too long loses its end."""
    return line if len(line) <= LINE_LIMIT else _NULS.sub(b"\0\0", line)[:LINE_LIMIT]


def parse(raw: bytes | str) -> Iterable[LogLine]:
    """The lines that one physical line holds: one, or several where JSON carries a message of several lines."""
    text = _clean(raw[:LINE_LIMIT].decode("utf-8", "replace") if isinstance(raw, bytes) else raw)
    if text.endswith("}") and '":' in text and 0 <= (brace := text.find("{")) < JSON_WITHIN:
        record = _json_record(text[brace:])
        if record is not None:
            return _from_json(record, text[:brace])
    return (_plain(text),)


def _clean(text: str) -> str:
    if not text.isprintable():
        text = _CONTROL.sub("", _ANSI.sub("", text))
    return text.rstrip()


def _plain(text: str) -> LogLine:
    head = _HEAD.search(text)
    if head is None:
        return _headless(text)
    level, stamp, file = head.groups()
    return LogLine(text[head.end() :], level, stamp, file, _front(text[: head.start()]))


@functools.lru_cache(maxsize=512)
def _front(text: str) -> Front:
    """What stands before vLLM's head; the same few again and again in most logs."""
    front, rest = _peel(text)
    late = tuple(_proc_name(match) for match in _PROC.finditer(rest))
    return _with_procs(front, (*front.procs, *late)) if late else front


def _peel(text: str) -> tuple[Front, str]:
    """Take prefixes off the beginning of a text."""
    procs: list[str] = []
    services: list[str] = []
    interrupted = False
    while True:
        if match := _PROC.match(text):
            procs.append(_proc_name(match))
        elif match := _PREFIX.match(text):
            services += [name for name in (match["compose"], match["pod"]) if name]
            interrupted = interrupted or match[0] == "^C"
        else:
            return _with_procs(Front(service=" ".join(services), interrupted=interrupted), tuple(procs)), text
        text = text[match.end() :]


def _with_procs(front: Front, procs: tuple[str, ...]) -> Front:
    last = procs[-1] if procs else ""
    from_api = _API_PROC.match(last) is not None
    from_engine = not from_api and any(_VLLM_PROC.match(name) for name in procs)
    return Front(procs, front.service, front.interrupted, from_api, from_engine, f"{front.service} {last}".strip())


def _headless(text: str) -> LogLine:
    front, text = _peel(text)
    level = None
    if match := _GLOG.match(text):
        level, text = _GLOG_LEVELS[match["letter"]], text[match.end() :]
    elif match := _LEVEL.match(text):
        level = match["a"] or match["b"] or match["c"] or match["d"]
        text = text[match.end() :]
    return LogLine(text, level, front=front if text else front._replace(interrupted=False))


def _proc_name(match: re.Match[str]) -> str:
    return f"{match['name'] or ''} pid={match['pid']}".lstrip()


def _json_record(text: str) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(data, dict) and any(isinstance(data.get(key), str) for key in _JSON_MESSAGES):
        return data
    return None


def _from_json(record: dict[str, Any], front: str) -> Iterator[LogLine]:
    """vLLM's JSON formatter (asctime, levelname, processName, process, message), docker's and journald's files."""
    message = next(record[key] for key in _JSON_MESSAGES if isinstance(record.get(key), str))
    level = next((str(record[key]).upper() for key in _JSON_LEVELS if isinstance(record.get(key), str)), None)
    stamp = _ISO_STAMP.match(str(record.get("asctime", "")))
    outside = _headless(front).front
    pid = record.get("process")
    named = () if pid is None else (f"{record.get('processName', '')} pid={pid}".lstrip(),)
    trace = record.get("exc_info")
    whole = message if not isinstance(trace, str) else f"{message}\n{trace}"
    for part in whole.splitlines():
        inner = _plain(_clean(part))
        procs = inner.procs or (*outside.procs, *named)
        yield LogLine(
            inner.text,
            inner.level or level,
            inner.stamp or (f"{stamp[1]} {stamp[2]}" if stamp and "levelname" in record else None),
            inner.file,
            _with_procs(Front(service=inner.front.service or outside.service), procs),
        )
