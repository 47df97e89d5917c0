"""The engine of real servers: ``vllm serve``, or whatever the command template starts, on this machine."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotune import devices
from autotune.engines import launch, scrape
from autotune.engines.control import Control, ControlError, ServedModel, api_key
from autotune.engines.driver import Target, drive
from autotune.engines.flags import check_owned, render
from autotune.engines.process import ServerProcess, end_orphans
from autotune.engines.startup import DEATH_S, ServerLog, StartError, Startup, cache_bytes, ended
from autotune.errors import LaunchFailed
from autotune.records.event import Emit, Event, nowhere
from autotune.records.load import LoadPlan, Message
from autotune.records.observation import Capacity, Failure, Observation, StopRule
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec

PORT_TRIES = 3
"""A port can be taken between our release and the server's bind: not the fault of the settings."""
RESOLVED = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "compilation_config",
    "speculative_config",
)
"""Sections of the server's own configuration that are kept."""
_SECRET = re.compile(r"token$|api_key|password|secret")


class HeldPort(Protocol):
    """A port that nobody else gets until it is released."""

    number: int

    def release(self) -> None:
        """Let the server have it."""
        ...


class VllmSession:
    """One life of a vLLM server; made by ``VllmEngine.session``."""

    def __init__(
        self,
        *,
        server: ServerProcess,
        log: ServerLog,
        control: Control,
        model: ServedModel,
        settings: Settings,
        argv: tuple[str, ...],
        startup_s: float,
        target: Target,
        emit: Emit,
    ) -> None:
        info = control.server_info()
        self.startup_s = startup_s
        self.argv = argv
        self.capacity = _capacity(log, control, model, info, settings)
        version = control.version() or log.reader.vllm_version
        self.versions: Mapping[str, str] = {} if version is None else {"vllm": version}
        self.resolved: Mapping[str, object] | None = None if info is None else _resolved(info)
        self._server, self._log, self._control = server, log, control
        self._target, self._emit = target, emit

    def observe(self, load: LoadPlan, *, stop: StopRule) -> Observation:
        """Run one load; a dead engine, an error, a stall are in the observation."""
        seen = drive(self._target, load, stop=stop, alive=self._failure, emit=self._emit)
        # What the load showed is a symptom; the log says why.
        if seen.end == "engine_died" or self._suspect(seen):
            cause = ended(self._server, self._log, ready=True, wait_s=DEATH_S) or self._log.failure(ready=True)
            if cause is None and self._control.health() == 503:
                cause = self._log.name(Failure(kind="engine_died", line="GET /health: 503"))
            if cause is not None or seen.end == "engine_died":
                return replace(seen, end="engine_died", failure=cause or seen.failure)
        if seen.end == "stalled":
            cause = self._log.failure(ready=True) or seen.failure
            return replace(seen, failure=None if cause is None else self._log.name(cause))
        return seen

    def token_ids(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, object] | None = None
    ) -> tuple[int, ...] | None:
        """A prompt by the server's own tokenizer and chat template; ``None`` where it cannot say."""
        try:
            return self._control.tokenize(
                self._target.model, messages=messages, chat_template_kwargs=chat_template_kwargs
            )
        except ControlError:
            return None

    @property
    def processes(self) -> dict[int, str]:
        """Process id and command line of all that the server started and that still runs."""
        return self._server.living

    def _failure(self) -> Failure | None:
        """Asked four times a second while a load runs, so it only looks at the process."""
        code = self._server.exit_code
        if code is None:
            return None
        return self._log.name(Failure(kind="engine_died", line=f"the server ended with exit code {code}"))

    def _suspect(self, seen: Observation) -> bool:
        """A load whose last requests failed may be over before the death of the server shows."""
        failed = any(r.error is not None and r.error.kind in ("connect", "server") for r in seen.requests)
        return not self._server.alive or (failed and self._control.health() != 200)


class VllmEngine:
    """Starts vLLM servers, one at a time, each in a session of its own."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        folder: Path | None = None,
        emit: Emit = nowhere,
        environment: Mapping[str, str] | None = None,
        nvml: Any | None = None,
        new_port: Callable[[], HeldPort] = launch.Port,
        memory_limit_s: float = 60.0,
    ) -> None:
        """An engine.

        Args:
            spec: model, command, fixed flags, devices and limits.
            folder: of the attempt: log and process record; ``None``: a new temporary one for each server.
            environment: of the server; ``None``: ours. The only place for secrets (HF_TOKEN, VLLM_API_KEY).
            nvml, new_port: other sources of GPUs and ports (tests).
            memory_limit_s: how long GPU memory may take to come back after a stop.
        """
        self._spec = spec
        self._folder = folder
        self._emit = emit
        self._environment = dict(os.environ if environment is None else environment)
        self._nvml = nvml
        self._new_port = new_port
        self._memory_limit_s = memory_limit_s

    def now(self) -> float:
        """Seconds of the clock that budgets are counted by."""
        return time.monotonic()

    @contextmanager
    def session(self, settings: Settings) -> Iterator[VllmSession]:
        """One server with these flags; ended, with everything it started, on leaving.

        Raises:
            LaunchFailed: it did not get ready; carries the failure and the seconds it took.
            PrerequisiteError: there is nothing to start it with, or the folder cannot be written to.
            InputError: a flag that autotune chooses itself, a GPU that is not here.
        """
        flags = Settings({**self._spec.fixed, **settings})
        check_owned(flags)
        gpus = devices.select(self._spec.devices, nvml=self._nvml, environment=self._environment)
        folder = self._folder or Path(tempfile.mkdtemp(prefix="autotune-"))
        for line in end_orphans(folder):
            self._note(line)
        began = time.monotonic()
        for attempt in range(1, PORT_TRIES + 1):
            with ExitStack() as stack:
                try:
                    session = self._start(stack, flags, folder, gpus)
                except StartError as error:
                    if error.failure.kind == "port_in_use" and attempt < PORT_TRIES:
                        self._note(f"port taken by somebody else, trying another: {error.failure.line}")
                        continue
                    raise LaunchFailed(error.failure, time.monotonic() - began) from error
                yield session
                return

    def _start(self, stack: ExitStack, flags: Settings, folder: Path, gpus: Sequence[devices.Gpu]) -> VllmSession:
        spec = self._spec
        words = [spec.model, *render(flags)]
        name = launch.new_name()
        port = self._new_port()
        stack.callback(port.release)
        line = launch.command_line(
            spec.vllm_command, words, port=port.number, name=name, devices=[gpu.index for gpu in gpus]
        )
        line = launch.found(line, self._environment)
        env = launch.server_environment(
            self._environment,
            devices=spec.devices,
            start_limit_s=spec.start_limit_s,
            stop_grace_s=spec.stop_grace_s,
        )
        pool = ThreadPoolExecutor(1, "autotune-control")
        # Not waited for: a stranger on our port may never answer.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        address = f"http://{launch.HOST}:{port.number}"
        key = api_key(env)
        control = stack.enter_context(Control(address, api_key=key))
        port.release()
        began = time.monotonic()
        server = ServerProcess.start(line, env=env, folder=folder)
        stack.callback(self._stop, server, gpus)
        log = ServerLog(server.log_path, _shown_path(server.log_path))
        self._tell("server_starting", settings=flags.to_data(), log=str(server.log_path))
        startup = Startup(
            server,
            log,
            pool,
            silence_limit_s=spec.silence_limit_s,
            start_limit_s=spec.start_limit_s,
            downloads=lambda: cache_bytes(spec.model, env),
        )
        model = startup.ready(control, name)
        session = VllmSession(
            server=server,
            log=log,
            control=control,
            model=model,
            settings=flags,
            argv=launch.shown(spec.vllm_command, words),
            startup_s=time.monotonic() - began,
            target=Target(
                base_url=address,
                model=name,
                api_key=key,
                metrics_url=f"{address}/metrics",
                health_url=f"{address}/health",
            ),
            emit=self._emit,
        )
        self._tell("server_ready", startup_s=session.startup_s, kv_tokens=session.capacity.kv_tokens)
        return session

    def _stop(self, server: ServerProcess, gpus: Sequence[devices.Gpu]) -> None:
        began = time.monotonic()
        server.stop(self._spec.stop_grace_s)
        taken = devices.wait_memory_back(gpus, limit_s=self._memory_limit_s, nvml=self._nvml)
        if taken is not None:
            self._note(taken)
        self._tell("server_stopped", seconds=time.monotonic() - began)

    def _note(self, text: str) -> None:
        self._tell("note", text=text)

    def _tell(self, kind: Any, **data: object) -> None:
        self._emit(Event(kind=kind, data=data))


def _capacity(
    log: ServerLog,
    control: Control,
    model: ServedModel,
    info: Mapping[str, Any] | None,
    settings: Settings,
) -> Capacity:
    log.update()
    try:
        page = control.metrics()
    except ControlError:
        page = ""
    from_log = log.reader.kv_capacity_tokens
    scheduler = info.get("scheduler_config") if info else None
    limit = scheduler.get("max_num_seqs") if isinstance(scheduler, dict) else settings.get("max_num_seqs")
    return Capacity(
        kv_tokens=scrape.kv_capacity_tokens(page) if from_log is None else from_log,
        engines=scrape.parse(page).engines or settings.integer("data_parallel_size", 1),
        max_model_len=model.max_model_len,
        max_num_seqs=limit if isinstance(limit, int) else None,
        source="metrics" if from_log is None else "log",
    )


def _resolved(info: Mapping[str, Any]) -> dict[str, object]:
    """Sections of the configuration, without anything that could be a secret."""
    kept: dict[str, object] = {}
    for section in RESOLVED:
        values = info.get(section)
        if isinstance(values, dict):
            kept[section] = {key: value for key, value in values.items() if not _SECRET.search(key)}
    return kept


def _shown_path(log: Path) -> str:
    """Relative to the study where the folder is one of its attempts (``studies/NAME/attempts/0007``)."""
    parts = log.absolute().parts
    return str(Path(*parts[-3:])) if parts[-3:-2] == ("attempts",) else str(log)
