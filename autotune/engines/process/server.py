"""One server process: started in a session of its own, watched, and ended with everything it started."""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.engines.process.family import MARKER, Family
from autotune.engines.process.record import write_record
from autotune.errors import PrerequisiteError

LOOK_EVERY_S = 0.25


class ServerProcess:
    """A running command. ``stop`` ends it and all that it started, whatever group, session or name they took."""

    def __init__(self, child: subprocess.Popen[bytes], marker: str, folder: Path, log_path: Path) -> None:
        self._child = child
        self._folder = folder
        self._family = Family(marker, session=child.pid)
        self._leave = threading.Event()
        self._looking = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="autotune-processes", daemon=True)
        self._stopped = False
        self.log_path = log_path
        """Output and errors of the server, in the order they came."""

    @classmethod
    def start(cls, argv: Sequence[str], *, env: Mapping[str, str], folder: Path) -> ServerProcess:
        """Start ``argv`` in a session of its own, its output into a log file that did not exist before.

        Raises:
            PrerequisiteError: the command is not there, or the folder cannot be written to.
        """
        marker = secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log_path, log = _new_log(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
        with open(log, "ab", buffering=0) as output:
            try:
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**env, MARKER: marker},
                    start_new_session=True,
                )
            except OSError as error:
                raise PrerequisiteError(
                    f"cannot start {argv[0]!r}: {error.strerror}", hint="--vllm-command says what to start"
                ) from error
        server = cls(child, marker, folder, log_path)
        try:
            server._family.look()
            server._record()
        except OSError as error:
            server.stop(grace_s=0)
            raise _unwritable(folder, error) from error
        server._watcher.start()
        return server

    @property
    def pid(self) -> int:
        """Process id of the command itself, also its group and session."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number where a signal ended it; ``None`` while it runs.

        Looks without reaping: while the dead leader is kept, no stranger can get its process id.
        """
        if self._child.returncode is not None:
            return self._child.returncode
        try:
            found = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored here, so the kernel reaped it
            return self._child.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def alive(self) -> bool:
        """Whether the command itself still runs."""
        return self.exit_code is None

    @property
    def living(self) -> dict[int, str]:
        """Process id and command line of everything it started that still runs, itself included."""
        with self._looking:
            self._family.look()
        return self._family.living_commands()

    def stop(self, grace_s: float) -> None:
        """TERM, ``grace_s`` seconds, KILL, and wait until every process of the family is gone.

        Raises:
            AutotuneError: something is still there long after SIGKILL.
        """
        if self._stopped:
            return
        self._leave.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._family.end(grace_s, keep_zombie=self._child.pid)
        self._child.wait()
        self._stopped = True
        self._try_to_record()

    def _watch(self) -> None:
        known = 0
        while not self._leave.wait(LOOK_EVERY_S):
            with self._looking:
                self._family.look()
            if len(self._family.members()) != known:
                known = len(self._family.members())
                self._try_to_record()

    def _try_to_record(self) -> None:
        """A disk that is full by now must not end the watch: the family is also known in memory."""
        try:
            self._record()
        except OSError:
            return

    def _record(self) -> None:
        write_record(self._folder, self._family, self.pid, self.log_path.name, ended=self._stopped)


def _new_log(folder: Path) -> tuple[Path, int]:
    """``server.log``, or ``server.2.log`` for a second server of the same attempt; never one that exists."""
    number = 1
    while True:
        path = folder / ("server.log" if number == 1 else f"server.{number}.log")
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1


def _unwritable(folder: Path, error: OSError) -> PrerequisiteError:
    return PrerequisiteError(
        f"cannot write to the attempt folder {folder}: {error.strerror}",
        hint="free some disk, or choose another folder",
    )
