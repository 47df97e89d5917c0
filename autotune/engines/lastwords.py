"""The words of a server's life in its log: start, ready, serving, stop, death.

Texts of vLLM 0.4 to 0.33, uvicorn, Python, shells and Slurm; ``rootcause`` has those that say why.
"""

from __future__ import annotations

import re

from autotune.records.observation import FailureKind

QUIET_LEVELS = ("DEBUG", "INFO", "WARNING", "WARN")

BANNER = re.compile(r"vLLM (?:API )?server version \S|[^A-Za-z]*\bversion v?\d+\.\d+\S*$")
"""A server starts."""
FRESH = re.compile(r"Initializing an? (?:V1 )?LLM engine")
"""An engine starts, after a stop."""
READY = re.compile(r"Application startup complete\.")
STARTING_HTTP = re.compile(r"Starting vLLM (?:API )?server\b.* on http")
"""The engine is ready, and uvicorn's words that follow are this server's."""
STATS = re.compile(
    r"(?:Engine \d+: |\d+ Engines Aggregated: )?Avg prompt throughput: .*?"
    r"Avg generation throughput: (?P<rate>\d+\.?\d*)"
)
ANSWERED = re.compile(r'\S+ - "(?:GET|POST) /(?:v\d/|health|metrics|ping|version)\S* HTTP/[\d.]+" 200')
"""uvicorn's access log: HTTP is up."""
UVICORN = re.compile(r"Started server process \[(?P<pid>\d+)\]")
ASKED = re.compile(
    r"Shutting down FastAPI HTTP server|\[shutdown\] API server: shutdown triggered|"
    r"\[shutdown\] EngineCore: trigger received signal|Received KeyboardInterrupt|"
    r"KeyboardInterrupt\b|slurmstepd: error: \*\*\* .* CANCELLED"
)
"""A stop that somebody asked for."""
STOPPED = re.compile(
    r"Shutting down$|Waiting for application shutdown|Application shutdown complete|Finished server process"
)
"""uvicorn's end, on request or after an engine's death."""
STOP_NOISE: frozenset[FailureKind | None] = frozenset({None, "oom", "nccl", "gpu_busy", "disk_full"})
"""What a stop may print without meaning it (``None``: exceptions that no rule knows)."""

EXCEPTION = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)(?::|\s*$)|(?:[a-z_]\w*\.)+[A-Z]\w+: |"
    r"\[Errno \d+\] |Value error, |Assertion failed, "
)
"""The last line of a traceback, or what pydantic prints below it."""
CODE = re.compile(r"\s+(?!Value error, |Assertion failed, )")
"""A traceback's source lines, which quote errors without meaning them."""
SECRET = re.compile(r"\b(hf_|sk-)[\w-]{8,}")
"""Tokens that must not be copied anywhere."""
USAGE_ERROR = re.compile(r"(?:vllm(?: \w[\w-]*)*|(?:openai/)?api_server\.py|vllm\.entrypoints\S*): error: ")
"""argparse: the process ends before it prints a banner."""
WRAPPER = re.compile(
    r"EngineDeadError|Engine core initialization failed|WorkerProc initialization failed|Worker failed with error|"
    r"Engine process failed to start|Background loop has errored|CancelledError|Failed to start|BrokenPipeError|"
    r"EOFError|died with exit code|died unexpectedly|HTTPException|EngineGenerateError|"
    r"Did not receive response from front-end"
)
"""Exceptions that only repeat that something else went wrong."""

DEAD_STARTING = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|WorkerProc failed to start|"
    r"WorkerProc initialization failed|Engine process failed to start|Frontend process failed during|"
    r"RPCServer process died before responding|Timed out waiting for engine|Application startup failed|"
    r"error while attempting to bind on address"
)
DEAD_SERVING = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|AsyncLLM output_handler (?:failed|got)|"
    r"Background loop (?:has errored|is stopped)|Engine background task failed|Engine loop (?:has died|is not running)"
)
DEAD = re.compile(
    r"EngineCore hit an exception|Got fatal signal from worker processes|Worker proc \S+ died unexpectedly|"
    r"RayWorkerProc rank=\S+ died|died with exit code|terminate called after throwing|Fatal Python error:|"
    r"!+ Segfault encountered|(?:\S.*: line \d+:\s+\d+ )?(?:Killed|Segmentation fault|Aborted)\b(?:\s|$)"
)
"""Last words while starting or serving."""
SILENT = re.compile(r"Engine core proc(?:ess)? \S+ died unexpectedly|engine core exited unexpectedly")
"""An engine is gone and did not say why; also printed when both were stopped at once."""
REQUEST_FILES = ("serving_", "serving.", "error_response", "protocol.")
"""Source files (in vLLM's head) that report on single requests."""

_SIGKILL = re.compile(r"exit code:? -9\b|: -9\b|\bKilled\b")
_KERNEL = re.compile(r"device-side assert|illegal memory access|(?:CUDA|HIP|XPU|NPU) error|Xid|misaligned address")
_KILLED = (
    "killed by SIGKILL, most often by the kernel because the host (or its container) ran out of memory: see `dmesg`, "
    "and whether somebody ended it"
)


def death_hint(text: str) -> str:
    """What to do about an engine that died while serving with these last words."""
    if _SIGKILL.search(text):
        return _KILLED
    if SILENT.search(text):
        return f"the engine process was gone without a word: it crashed, or was {_KILLED}"
    if _KERNEL.search(text):
        return (
            "a GPU kernel failed, which no memory setting cures: try another attention backend, --enforce-eager or "
            "another vLLM version, and look for Xid errors in `dmesg`"
        )
    return "the engine died while serving and the line is its last word: read the log there; try again with less load"


def unknown_hint(text: str) -> str:
    """What to do about a start that failed with these last words, which no rule knows."""
    if _SIGKILL.search(text):
        return _KILLED
    if "Timed out waiting for engine" in text:
        return "the engine was not ready in time: raise VLLM_ENGINE_READY_TIMEOUT_S, or look what it waits for"
    if "No module named" in text or "ImportError" in text:
        return "the installation is broken or incomplete: no setting cures it, reinstall vLLM and what the line names"
    return "no known cause: read the log from this line on; if other settings fail alike, it is not the settings"


def exit_hint(exit_code: int) -> str:
    """What a bare exit status (negative or above 128: a signal) says."""
    signal = -exit_code if exit_code < 0 else exit_code - 128
    if signal == 9:
        return _KILLED
    if exit_code == 127:
        return "the command was not found: is vLLM installed in this environment?"
    if signal in (6, 11):
        return "the process crashed (SIGSEGV or SIGABRT): no setting is known to cure it, try another vLLM version"
    if signal == 15:
        return "somebody ended the process with SIGTERM"
    return f"the process ended by itself with exit code {exit_code}: read the end of its log"
