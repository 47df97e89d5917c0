"""``process.json`` of an attempt: what was started, so that a later run can end what a dead one left behind."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from autotune.engines.process.family import Family, name, processes, started_s, words

RECORD = "process.json"
SAME_START_S = 0.02
"""Start times are known in kernel ticks of 10 ms."""


def write_record(folder: Path, family: Family, session: int, log: str, *, ended: bool) -> None:
    """Write the record whole: a reader sees the old one or the new one.

    Raises:
        OSError: the folder cannot be written to.
    """
    record = {
        "schema": "autotune/process/1",
        "place": _place(),
        "host": socket.gethostname(),
        "owner": _identity(psutil.Process()),
        "marker": family.marker,
        "session": session,
        "log": log,
        "ended": ended,
        "processes": [_identity(process) for process in family.members()],
    }
    _write_whole(folder / RECORD, record)


def end_orphans(folder: Path, *, grace_s: float = 5.0) -> list[str]:
    """End what a dead run left behind, by the record in its attempt folder; a line for each process.

    Only processes whose id *and* start time match the record, their session and descendants, and those that
    carry the record's marker. A record of another host, of another process-id namespace or of a run that still
    lives is left alone.

    Raises:
        AutotuneError: something is still there after SIGKILL.
    """
    record, family, notes = _left_over(folder)
    if family is None:
        return notes
    lines = [f"ended {words(process)}, left by a run that died ({folder})" for process in family.living()]
    family.end(grace_s)
    _write_whole(folder / RECORD, {**record, "ended": True})
    return lines


def orphans(folder: Path) -> list[str]:
    """What ``end_orphans`` would end, a line for each process, or why it would end nothing."""
    _, family, notes = _left_over(folder)
    return notes if family is None else [f"{words(process)} ({folder})" for process in family.living()]


def _left_over(folder: Path) -> tuple[dict[str, Any], Family | None, list[str]]:
    """The record, the processes that a dead run left (``None``: not to be touched), and what to say of it."""
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        recorded = [(entry["pid"], entry["started_s"]) for entry in record["processes"]]
        owner = (record["owner"]["pid"], record["owner"]["started_s"])
        ended, place, host = record["ended"], record["place"], record["host"]
        marker, session = record["marker"], record["session"]
    except FileNotFoundError:
        return {}, None, []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, None, [f"{path} cannot be read ({error}): nothing was ended by it"]
    if ended:
        return record, None, []
    if place != _place():
        line = f"{path} was written on {host}, before a restart or in another container: not looked for here"
        return record, None, [line]
    if owner[0] != os.getpid() and _matching([owner]):
        return record, None, []
    members = _matching(recorded)
    # A session id is not used again while one of its processes lives.
    still_ours = any(_session(process) == session for process in members)
    family = Family(marker, session if still_ours else None, members)
    family.look(closely=True)
    return record, family, []


def _matching(identities: Iterable[tuple[int, float | None]]) -> list[psutil.Process]:
    wanted = dict(identities)
    found = []
    for process in processes(wanted):
        recorded, started = wanted[process.pid], started_s(process)
        if recorded is not None and started is not None and abs(started - recorded) <= SAME_START_S:
            found.append(process)
    return found


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _identity(process: psutil.Process) -> dict[str, Any]:
    return {"pid": process.pid, "started_s": started_s(process), "name": name(process)}


def _place() -> str:
    """Names this boot of this host and this process-id namespace: process ids mean nothing elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _write_whole(path: Path, record: dict[str, Any]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
