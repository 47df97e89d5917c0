"""Faults of the fake server, by name: ``FAKE_VLLM_FAULT="dies_on_request:3,child_setsid"`` or ``--fake-fault``.

A fault is one row of ``FAULTS``: where it strikes and a function. ``boot`` runs before anything else, ``child``
gives the code of the engine's process, ``serve`` runs when the server is ready (a coroutine beside it),
``request`` runs before each completion (first argument: the ``Routes``) and may answer in its place,
``health`` before each ``/health``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Exit code of a start that fails and what it prints: bare lines, or logged by the engine's process.
# Own words in the shape of vLLM's.
DEATHS: dict[str, tuple[int, tuple[str, ...]]] = {
    "kv_too_small": (
        1,
        (
            "ENGINE ValueError: To serve at least one request with the model's max seq len (4096), (0.50 GiB KV cache"
            " is needed, which is larger than the available KV cache memory (0.10 GiB). Based on the available"
            " memory, the estimated maximum model length is 768. Try increasing `gpu_memory_utilization` or"
            " decreasing `max_model_len` when initializing the engine.",
        ),
    ),
    "no_kv_memory": (
        1,
        (
            "ENGINE ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
            " when initializing the engine.",
        ),
    ),
    "oom": (
        1,
        (
            "ENGINE torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
            " capacity of 79.11 GiB of which 1.12 GiB is free.",
        ),
    ),
    "gpu_busy": (
        1,
        (
            "ENGINE ValueError: Free memory on device cuda:0 (11.2/79.11 GiB) on startup is less than desired GPU"
            " memory utilization (0.92, 72.78 GiB). Decrease GPU memory utilization or reduce GPU memory used by"
            " other processes.",
        ),
    ),
    "tp_not_divisible": (
        1,
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
            "  Value error, Total number of attention heads (32) must be divisible by tensor parallel size (3).",
        ),
    ),
    "gated_model": (
        1,
        (
            "OSError: You are trying to access a gated repo.",
            "Make sure to have access to it at https://huggingface.co/acme/secret. 401 Client Error.",
        ),
    ),
    "nccl": (1, ("ENGINE RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",)),
    "bad_flag": (2, ("usage: vllm [-h] [-v] {serve,bench} ...", "vllm: error: unrecognized arguments: --no-such")),
    "port_in_use": (1, ("OSError: [Errno 98] Address already in use",)),
    "code_0": (0, ()),
    "quietly": (1, ()),
    "no_vllm": (1, ("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'vllm'")),
}


DROP = "drop"
"""Answer of a request fault that cuts the connection."""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    boot: Callable[[Any, str], None] | None = None
    child: str | None = None
    serve: Callable[[Any, str], Any] | None = None
    request: Callable[[Any, str, int], Any] | None = None
    health: Callable[[Any, str], Any] | None = None


def die(server: Any, kind: str) -> None:
    code, lines = DEATHS[kind]
    for line in lines:
        who, _, text = line.partition(" ")
        if who == "ENGINE":
            server.log(text, level="ERROR", engine=True)
        else:
            server.print(line)
    if any(line.startswith("ENGINE") for line in lines):
        server.log("RuntimeError: Engine core initialization failed. See root cause above.", level="ERROR")
    server.end(code)


def die_later(server: Any, arg: str) -> None:
    """``dies_after:0.3:oom``: after so many seconds of loading."""
    seconds, _, kind = arg.partition(":")
    time.sleep(float(seconds))
    die(server, kind or "quietly")


def linger(server: Any, kind: str) -> None:
    """The log names the end, the process stays."""
    for line in DEATHS[kind][1]:
        server.log(line.removeprefix("ENGINE "), level="ERROR", engine=True)
    server.log("EngineCore failed to start.", level="ERROR", engine=True)
    time.sleep(600)


def talk(server: Any, arg: str) -> None:
    """Never ready, a line every tenth of a second."""
    while True:
        server.log("Still getting ready.")
        time.sleep(0.1)


def be_silent(server: Any, arg: str) -> None:
    time.sleep(600)


def download(server: Any, seconds: str) -> None:
    """Progress of a download for so many seconds, then on as usual."""
    began = time.monotonic()
    while (gone := time.monotonic() - began) < float(seconds):
        part = 100 * gone / float(seconds)
        server.print(f"model-00001-of-00002.safetensors: {part:3.0f}%|####      | {part / 20:.2f}G/5.00G")
        time.sleep(0.05)


def load_silently(server: Any, seconds: str) -> None:
    time.sleep(float(seconds))


def ignore_term(server: Any, arg: str) -> None:
    server.deaf = True


def wrong_name(server: Any, arg: str) -> None:
    server.name = "somebody-else"


def no_kv_line(server: Any, arg: str) -> None:
    """The log does not say the capacity."""
    server.kv_line = False


def stay_up(server: Any, arg: str) -> None:
    """A server whose engine is dead goes on answering; it says nothing of it."""
    server.stays = True


def rename(server: Any, arg: str) -> None:
    ctypes.CDLL(None).prctl(15, b"VLLM::APIServer", 0, 0, 0)


async def health_slow(server: Any, seconds: str) -> None:
    await asyncio.sleep(float(seconds))


async def error_every(routes: Any, arg: str, number: int) -> Any:
    """``errors:3``: every third completion is a 500."""
    return routes.error(500, "InternalServerError", "made to fail") if number % int(arg or 1) == 0 else None


async def drop_every(routes: Any, arg: str, number: int) -> Any:
    """``drops:3``: every third completion loses its connection."""
    return DROP if number % int(arg or 1) == 0 else None


async def die_on(routes: Any, arg: str, number: int) -> Any:
    """``dies_on_request:3`` or ``dies_on_request:3:oom``: the engine dies when the third completion comes."""
    count, _, kind = arg.partition(":")
    if number == int(count or 1):
        routes.server.engine_dies(kind or "engine")
    return None


async def exit_on(routes: Any, arg: str, number: int) -> Any:
    """``exits_on_request:3:-9``: the whole server ends at once, by a code or a signal."""
    count, _, code = arg.partition(":")
    if number == int(count or 1):
        value = int(code or 0)
        if value < 0:
            os.kill(os.getpid(), -value)
        routes.server.end(value)
    return None


async def hang_on(routes: Any, arg: str, number: int) -> Any:
    """``hangs_on_request:3``: from then on nothing is generated, everything else answers."""
    if number >= int(arg or 1):
        routes.server.hang()
    return None


SETSID = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
RENAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'VLLM::EngineCor', 0, 0, 0); time.sleep(300)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
# A daemon: its parent ends at once, so only the environment says whose it is.
DAEMON = "import os, time\nif os.fork(): time.sleep(300)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(300)"
NESTED = (
    f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-E', '-c', {SETSID!r}]); time.sleep(300)"
)

FAULTS: dict[str, Fault] = {
    "dies_at_start": Fault(boot=die),
    "dies_after": Fault(boot=die_later),
    "lingers": Fault(boot=linger),
    "never_ready": Fault(boot=talk),
    "silent": Fault(boot=be_silent),
    "downloads": Fault(boot=download),
    "loads_silently": Fault(boot=load_silently),
    "ignores_term": Fault(boot=ignore_term),
    "wrong_name": Fault(boot=wrong_name),
    "no_kv_line": Fault(boot=no_kv_line),
    "stays_up": Fault(boot=stay_up),
    "renamed": Fault(boot=rename),
    "child_setsid": Fault(child=SETSID),
    "child_renamed": Fault(child=RENAMED),
    "child_deaf": Fault(child=DEAF),
    "child_daemon": Fault(child=DAEMON),
    "child_nested": Fault(child=NESTED),
    "slow_health": Fault(health=health_slow),
    "errors": Fault(request=error_every),
    "drops": Fault(request=drop_every),
    "dies_on_request": Fault(request=die_on),
    "exits_on_request": Fault(request=exit_on),
    "hangs_on_request": Fault(request=hang_on),
}


def chosen(text: str) -> list[tuple[Fault, str]]:
    """The faults that a comma-separated list names, each with its argument."""
    found = []
    for part in filter(None, text.split(",")):
        name, _, arg = part.partition(":")
        if name not in FAULTS:
            sys.exit(f"fake vllm: no fault {name!r}; known: {', '.join(FAULTS)}")
        found.append((FAULTS[name], arg))
    return found
