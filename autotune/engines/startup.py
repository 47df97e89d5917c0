"""From a started process to a server that has generated: what is waited for, and what ends the wait."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from autotune.engines.control import Control, ControlError, ServedModel
from autotune.engines.launch import NO_VLLM, no_program
from autotune.engines.serverlog import LogReader
from autotune.records.observation import Failure

T = TypeVar("T")

LOOK_EVERY_S = 0.1
ASK_EVERY_S = 0.3
LINGER_S = 20.0
"""A start whose log has named its end but whose process stays is over after so long without a new line."""
DEATH_S = 10.0
"""vLLM looks after its engine every 5 s and then ends itself."""
FLUSH_S = 1.0
"""Children may write their last words after the command itself has ended."""
CACHE_EVERY_S = 5.0
DOWNLOAD_LIMIT_S = 6 * 3600.0
_DOWNLOAD = re.compile(
    rb"Fetching \d+ files|[Dd]ownloading|\.(?:safetensors|bin|gguf|pt): +\d+%|Time spent downloading"
)


class StartError(Exception):
    """The server will not get ready; carries why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.line}")
        self.failure = failure


class Process(Protocol):
    """What is asked of the server's process."""

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        ...


class ServerLog:
    """The log of one server, read as it grows."""

    def __init__(self, path: Path, shown: str) -> None:
        self.reader = LogReader()
        self.grew_at = time.monotonic()
        """Clock of the newest output."""
        self.downloading = False
        """The newest output is progress of a download."""
        self.without_vllm = False
        self.last_line = ""
        self._path = path
        self._shown = shown
        self._place = 0

    def update(self) -> None:
        """Read what is new."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            while chunk := file.read(1 << 20):
                self._place += len(chunk)
                self.grew_at = time.monotonic()
                self.downloading = bool(_DOWNLOAD.search(chunk[-4096:]))
                self.without_vllm = self.without_vllm or NO_VLLM.encode() in chunk
                self.reader.feed(chunk)
                words = [line.strip() for line in re.split(rb"[\r\n]+", chunk[-4096:]) if line.strip()]
                self.last_line = words[-1].decode("utf-8", "replace")[:300] if words else self.last_line

    def failure(self, *, exit_code: int | None = None, ready: bool) -> Failure | None:
        """What ended the server, by its own words."""
        self.update()
        self.reader.close()
        failure = self.reader.failure(exit_code=exit_code, ready=ready)
        return None if failure is None else self.name(failure)

    def name(self, failure: Failure) -> Failure:
        """The failure with the log that it was read from."""
        return replace(failure, log_path=self._shown)


class Startup:
    """Watches one start."""

    def __init__(
        self,
        server: Process,
        log: ServerLog,
        pool: Executor,
        *,
        silence_limit_s: float,
        start_limit_s: float,
        downloads: Callable[[], int | None],
    ) -> None:
        self._server, self._log, self._pool = server, log, pool
        self._silence_limit_s, self._start_limit_s = silence_limit_s, start_limit_s
        self._downloads = downloads
        self._began = time.monotonic()
        self._looked_at = self._began
        self._download_s = 0.0
        self._cache_at = self._began
        self._cache_bytes: int | None = None
        self._cache_grew_at = 0.0

    def ready(self, control: Control, name: str) -> ServedModel:
        """Wait for ``/health`` 200 and ``name`` among the served models; then for a real answer.

        Raises:
            StartError: the process ended, was silent too long, took too long, or cannot generate.
            PrerequisiteError: the command has no vLLM to start.
        """
        while (model := self.while_alive(lambda: _served(control, name))) is None:
            self.look()
            time.sleep(LOOK_EVERY_S)
        try:
            # A server may pass every check and die on its first token.
            self.while_alive(lambda: control.generate(name, tokens=2, limit_s=self._start_limit_s))
        except ControlError as error:
            raise StartError(self._first_request_failed(error)) from error
        return model

    def while_alive(self, call: Callable[[], T]) -> T:
        """The result of ``call``, unless the start ends before it is there."""
        asked: Future[T] = self._pool.submit(call)
        while True:
            try:
                return asked.result(timeout=LOOK_EVERY_S)
            except TimeoutError:
                if asked.done():
                    continue
            self.look()

    def look(self) -> None:
        """Raise what ends the start.

        Raises:
            StartError, PrerequisiteError: as for ``ready``.
        """
        now = time.monotonic()
        self._log.update()
        failure = ended(self._server, self._log, ready=False)
        if failure is not None:
            raise StartError(failure)
        downloading = self._is_downloading(now)
        if downloading:
            self._download_s += now - self._looked_at
        self._looked_at = now
        silent_s = now - max(self._log.grew_at, self._cache_grew_at)
        if silent_s > min(LINGER_S, self._silence_limit_s):
            said = self._log.reader.failure()
            if said is not None and said.kind != "unknown":
                raise StartError(self._log.name(said))
        if silent_s > self._silence_limit_s:
            raise StartError(self._timeout(f"no new line of log for {silent_s:.0f} s"))
        took_s = now - self._began - min(self._download_s, DOWNLOAD_LIMIT_S)
        if took_s > self._start_limit_s:
            raise StartError(self._timeout(f"not ready after {now - self._began:.0f} s"))

    def _first_request_failed(self, error: ControlError) -> Failure:
        refused = error.status is not None and error.status < 500
        failure = None if refused else ended(self._server, self._log, ready=True, wait_s=DEATH_S)
        failure = failure or self._log.failure(ready=True)
        return failure or self._log.name(
            Failure(
                kind="unknown",
                line=f"the server is up but did not answer a first request: {error}",
                hint="is it a model that generates text?",
            )
        )

    def _is_downloading(self, now: float) -> bool:
        if now - self._cache_at >= CACHE_EVERY_S:
            self._cache_at = now
            size = self._downloads()
            if size is not None and self._cache_bytes is not None and size > self._cache_bytes:
                self._cache_grew_at = now
            self._cache_bytes = size
        by_log = self._log.downloading and now - self._log.grew_at < 2 * CACHE_EVERY_S
        return by_log or now - self._cache_grew_at < 2 * CACHE_EVERY_S

    def _timeout(self, what: str) -> Failure:
        line = f"{what}; its last line: {self._log.last_line or '(none)'}"
        return self._log.name(
            Failure(kind="start_timeout", line=line, hint="a slow disk or a long compilation needs a higher limit")
        )


def ended(server: Process, log: ServerLog, *, ready: bool, wait_s: float = 0.0) -> Failure | None:
    """Why the server ended, from its exit code and its log; ``None`` while it runs.

    Args:
        ready: whether it had become ready.
        wait_s: how long to wait for an exit that is expected.

    Raises:
        PrerequisiteError: the command has no vLLM to start.
    """
    deadline = time.monotonic() + wait_s
    while (code := server.exit_code) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)
    flushed = time.monotonic() + FLUSH_S
    log.update()
    while time.monotonic() < flushed and time.monotonic() - log.grew_at < FLUSH_S / 4:
        time.sleep(0.02)
        log.update()
    if log.without_vllm and not ready:
        raise no_program("vllm")
    failure = log.failure(exit_code=code, ready=ready)
    return failure or log.name(Failure(kind="unknown", line=f"it ended with exit code {code}: {log.last_line}"))


def cache_bytes(model: str, environment: Mapping[str, str]) -> int | None:
    """Bytes of a hub model in the local cache, unfinished files included; ``None`` for a local folder."""
    if model.count("/") != 1 or Path(model).exists():
        return None
    home = environment.get("HF_HOME") or Path(environment.get("HOME", "/")) / ".cache" / "huggingface"
    hub = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    try:
        with os.scandir(hub / f"models--{model.replace('/', '--')}" / "blobs") as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:
        return 0


def _served(control: Control, name: str) -> ServedModel | None:
    if control.health() != 200:
        return None
    try:
        return next((model for model in control.models() if model.name == name), None)
    except ControlError:
        return None
