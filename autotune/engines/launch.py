"""How a server is started: command line from a template, port of the loopback, name, environment."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.errors import InputError, PrerequisiteError

HOST = "127.0.0.1"
PLACEHOLDERS = ("args", "host", "port", "name", "devices")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_SECRET = re.compile(r"(?i)((?:token|api[-_]?key|password|secret)[\w-]*=)\S+")
_HF_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_OURS = {"--host": "host", "--port": "port", "--served-model-name": "name"}

NO_VLLM = "No module named 'vllm"
"""What Python says where the command runs but vLLM is not installed."""
INSTALL_HINT = (
    "pip install 'vllm-autotune[vllm]', or say with --vllm-command what serves vLLM here "
    "(autotune ... --engine sim needs none)"
)


class Port:
    """A free port of the loopback, held until ``release``, so that two starts do not get the same one."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let the server have it; call this just before the start."""
        self._socket.close()


def new_name() -> str:
    """A served model name that no other server has: it proves that the one that answers is ours."""
    return f"autotune-{secrets.token_hex(4)}"


def command_line(
    template: str, args: Sequence[str], *, port: int, name: str, devices: Sequence[int] | None = None
) -> list[str]:
    """The command that starts a server.

    ``{args}`` is the model and its flags, with ``--host``, ``--port`` and ``--served-model-name`` unless the
    template places ``{host}``, ``{port}`` or ``{name}`` itself. Without ``{args}`` they are appended.

    Args:
        template: as a shell would read it; ``{args}`` inside a longer word is quoted for a shell.
        args: model and flags.

    Raises:
        InputError: the template is empty, cannot be split, has an unknown placeholder, or fixes what is ours.
    """
    words = split(template)
    used = {match for word in words for match in _PLACEHOLDER.findall(word)}
    unknown = used - set(PLACEHOLDERS)
    if unknown:
        raise InputError(
            f"--vllm-command has the unknown placeholder {{{min(unknown)}}}",
            hint="known: " + ", ".join(f"{{{word}}}" for word in PLACEHOLDERS),
        )
    values = {"host": HOST, "port": str(port), "name": name, "devices": ",".join(map(str, devices or ()))}
    full = list(args)
    for flag, word in _OURS.items():
        if word not in used:
            if any(given == flag or given.startswith(flag + "=") for given in words):
                raise InputError(
                    f"--vllm-command fixes {flag}, which is chosen for each server",
                    hint=f"leave it out, or write {flag} {{{word}}}",
                )
            full += [flag, values[word]]
    return _filled(words, full, values)


def shown(template: str, args: Sequence[str]) -> tuple[str, ...]:
    """The command line as it is recorded: without what is different at each start, and without secrets."""
    placeholders = {word: f"{{{word}}}" for word in PLACEHOLDERS}
    line = _filled(split(template), args, placeholders)
    return tuple(_HF_TOKEN.sub("hf_***", _SECRET.sub(r"\1***", word)) for word in line)


def _filled(words: Sequence[str], args: Sequence[str], values: Mapping[str, str]) -> list[str]:
    inside = {**values, "args": shlex.join(args)}
    line: list[str] = []
    placed = False
    for word in words:
        placed = placed or "{args}" in word
        if word == "{args}":
            line += args
        else:
            line.append(_PLACEHOLDER.sub(lambda match: inside[match[1]], word))
    return line if placed else [*line, *args]


def split(template: str) -> list[str]:
    """The words of a command line, as a shell would read them.

    Raises:
        InputError: nothing in it, or a quotation that does not end.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise InputError(f"--vllm-command {template!r} cannot be read: {error}", hint="check its quotes") from None
    if not words:
        raise InputError("--vllm-command is empty", hint="the default is 'vllm serve'")
    return words


def found(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """``argv`` with its program's path, looked for on PATH and beside this Python.

    Raises:
        PrerequisiteError: it is not there.
    """
    beside = str(Path(sys.executable).parent)
    path = shutil.which(argv[0], path=os.pathsep.join((env.get("PATH", os.defpath), beside)))
    if path is None:
        raise no_program(argv[0])
    return [path, *argv[1:]]


def no_program(program: str) -> PrerequisiteError:
    """The error for a machine without vLLM."""
    return PrerequisiteError(f"{program!r} is not installed here, so no server can be started", hint=INSTALL_HINT)


def server_environment(
    base: Mapping[str, str], *, devices: Sequence[int] | None, start_limit_s: float, stop_grace_s: float
) -> dict[str, str]:
    """Environment of the server: the caller's, made safe to measure in.

    Sources: facts on vLLM 0.11 to 0.33 (envs.py, loggers.py, launcher.py).
    """
    env = dict(base)
    for name in (
        "PROMETHEUS_MULTIPROC_DIR",  # set: numbers of earlier runs
        "prometheus_multiproc_dir",
        "VLLM_PORT",  # the base of internal ports, not the HTTP port: two servers would collide
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",  # set: a dead engine keeps answering
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_COLOR",
        "FORCE_COLOR",
    ):
        env.pop(name, None)
    env.update(
        VLLM_SERVER_DEV_MODE="1",  # /server_info and cache resets; the server listens on the loopback only
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_LOG_STATS_INTERVAL="5",
        NO_COLOR="1",
        PYTHONUNBUFFERED="1",
    )
    if env.get("VLLM_LOGGING_LEVEL", "").upper() != "DEBUG":
        env["VLLM_LOGGING_LEVEL"] = "INFO"  # the capacity line is INFO
    # Our own limits decide, not vLLM's 600 s.
    env.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(start_limit_s)))
    # Unset, vLLM >= 0.20 kills its workers at once on SIGTERM; it must be done before our SIGKILL.
    env.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(max(1, min(5, int(stop_grace_s / 2)))))
    if devices is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that an index means the same GPU as in NVML
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return env
