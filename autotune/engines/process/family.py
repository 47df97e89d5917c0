"""Which processes descend from one start, whatever group, session or name they took; and the end of all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import psutil

from autotune.errors import AutotuneError

MARKER = "AUTOTUNE_ATTEMPT"
"""Environment variable that every child inherits: finds those that left group and session between two looks."""
KILL_LIMIT_S = 30.0
"""How long a killed process may take to go (a driver frees its memory inside the exit of the process)."""


class Family:
    """The processes of one start: found by parentage, session, group or the marker they inherited."""

    def __init__(self, marker: str, session: int | None = None, members: Iterable[psutil.Process] = ()) -> None:
        self.marker = marker
        self._session = session
        self._members = {process.pid: process for process in members}
        self._strangers: set[int] = set()

    def members(self) -> list[psutil.Process]:
        """Every process that was ever seen, dead ones included."""
        return list(self._members.values())

    def living(self) -> list[psutil.Process]:
        """Those that still run; a zombie does not (its memory is free)."""
        return [process for process in self.members() if lives(process)]

    def living_commands(self) -> dict[int, str]:
        """Process id -> command line of those that still run."""
        found = {}
        for process in self.living():
            try:
                found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:
                continue
        return found

    def look(self, *, closely: bool = False) -> bool:
        """Find new members; True if there are any.

        A process that is a stranger when first seen stays one, so only new process ids are looked at, except
        ``closely`` (a process id may have been used again since).
        """
        pids = set(psutil.pids())
        self._strangers = set() if closely else self._strangers & pids
        known = {process.pid for process in self.living()} if closely else set(self._members)
        unknown = processes(pids - self._strangers - known)
        found = False
        while new := [process for process in unknown if self._belongs(process)]:
            found = True
            self._members.update((process.pid, process) for process in new)
            unknown = [process for process in unknown if process not in new]
        self._strangers |= {process.pid for process in unknown}
        return found

    def end(self, grace_s: float, *, keep_zombie: int | None = None) -> None:
        """TERM to all, ``grace_s`` seconds, KILL to all, wait until none is left.

        Raises:
            AutotuneError: something is still there ``KILL_LIMIT_S`` after SIGKILL.
        """
        self.look(closely=True)
        self._signal(signal.SIGTERM)
        if self._wait(grace_s, keep_zombie):
            return
        self._signal(signal.SIGKILL)
        if not self._wait(KILL_LIMIT_S, keep_zombie, kill_new=True):
            left = ", ".join(words(process) for process in self.living())
            raise AutotuneError(
                f"still there {KILL_LIMIT_S:.0f} s after SIGKILL: {left}",
                hint="such a process waits inside a driver or a file system; what it holds stays taken until it goes",
            )

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            if process.pid == os.getpid() or not lives(process):
                return False
            if self._session is not None and self._session in (
                process.pid,
                os.getsid(process.pid),
                os.getpgid(process.pid),
            ):
                return True
            parent = self._members.get(process.ppid())
            if parent is not None and lives(parent):
                return True
            return process.environ().get(MARKER) == self.marker
        except (psutil.Error, OSError):
            return False

    def _signal(self, number: int) -> None:
        for process in self.living():
            try:
                process.send_signal(number)  # psutil compares the start time first: never a stranger
            except psutil.Error:
                continue

    def _wait(self, limit_s: float, keep_zombie: int | None, *, kill_new: bool = False) -> bool:
        deadline = time.monotonic() + limit_s
        pause_s = 0.01
        while True:
            if self.look() and kill_new:
                self._signal(signal.SIGKILL)
            self._reap(keep_zombie)
            if not self.living() and not self.look(closely=True):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(0.2, pause_s * 1.5)

    def _reap(self, keep: int | None) -> None:
        """Orphans of the server become our children where we are process 1 (a container) or a subreaper."""
        for pid in self._members:
            if pid != keep:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of ``pids`` that exist."""
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.Error:
            continue
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it runs, under this start time, and is no zombie."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def started_s(process: psutil.Process) -> float | None:
    """Seconds from boot to the start of the process: unlike the wall clock, nothing sets it."""
    try:
        return round(process.create_time() - psutil.boot_time(), 2)
    except psutil.Error:
        return None


def name(process: psutil.Process) -> str:
    """Its short name, for messages only."""
    try:
        return process.name()
    except psutil.Error:
        return "?"


def words(process: psutil.Process) -> str:
    """The process in a message."""
    return f"{name(process)} (pid {process.pid})"
