"""What ``autotune search`` needs on this host, looked at one by one, each with what to do about it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from autotune import devices
from autotune.engines import end_left_over, launch, left_over
from autotune.engines.ceiling import ANSWER_TOKENS, Ceiling, client_ceiling
from autotune.engines.driver.exchange import SPARE_FILES
from autotune.engines.process.family import processes, words
from autotune.errors import AutotuneError

GIB = 1 << 30
LEAST_BYTES = 100 << 20
"""A study writes less than this: logs, one line a trial."""
OTHERS_BYTES = 1 * GIB
"""Memory in use on a GPU that is worth a word: a context of its own takes about half of it."""
ANSWER_S, VERSION_S = 3.0, 30.0
HUB = "https://huggingface.co"
_TRUE = ("1", "true", "yes", "on")
_VERSION = "from importlib.metadata import version; print(version('vllm'))"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "note", "missing"]
    """``missing``: ``autotune search`` could not start."""
    text: str
    hint: str | None = None
    """What to do."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it."""

    SCHEMA: ClassVar[str] = "autotune/doctor/1"

    can_search: bool
    checks: tuple[Check, ...]
    ceiling: Ceiling | None
    """``None``: not measured."""


def examine(
    vllm_command: str,
    studies: Path,
    *,
    cpu_limit: float,
    lag_limit_s: float,
    clean: bool = False,
    load: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Look at everything.

    Args:
        vllm_command: what serves vLLM here, as for ``search``.
        studies: folder of the studies, whether it exists or not.
        cpu_limit, lag_limit_s: what the client may use in a valid measurement (``client_ceiling``).
        clean: end servers of ours that a killed run left under ``studies``.
        load: measure the client's ceiling, ten seconds; not done while a search holds anything.
        environment: ``None``: that of this process. No value of it that may be a secret is told.
    """
    env = dict(os.environ if environment is None else environment)
    gpus = devices.visible(devices.gpus(), env)
    held = locks(gpus, studies, env)
    checks = [vllm(vllm_command, env), driver(), *map(gpu, gpus), held, disk("studies", studies), *caches(env)]
    checks += [hub(env), open_files(), left_servers(studies, clean=clean)]
    ceiling = None
    if load and held.status == "ok":
        ceiling = client_ceiling(cpu_limit=cpu_limit, lag_limit_s=lag_limit_s)
        checks.append(client(ceiling))
    elif load:
        text = "its ceiling is not measured: what holds the lock would be disturbed"
        checks.append(Check(name="client", status="note", text=text))
    can_search = all(check.status != "missing" for check in checks)
    return Report(can_search=can_search, checks=tuple(checks), ceiling=ceiling)


def vllm(command: str, environment: Mapping[str, str]) -> Check:
    """Whether the command is there, and which vLLM it runs, without importing it."""
    try:
        argv = launch.found(launch.split(command), environment)
    except AutotuneError as error:
        return Check(name="vllm", status="missing", text=error.message, hint=error.hint)
    python = _python_of(Path(argv[0]))
    if python is None:
        text = f"{argv[0]} is there; which vLLM it runs shows at the first start"
        return Check(name="vllm", status="note", text=text)
    try:
        done = subprocess.run(
            [str(python), "-c", _VERSION],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name="vllm", status="missing", text=f"{python} does not run: {error}", hint=launch.INSTALL_HINT)
    if done.returncode:
        text = f"vLLM is not installed in the Python of {argv[0]}"
        return Check(name="vllm", status="missing", text=text, hint=launch.INSTALL_HINT)
    return Check(name="vllm", status="ok", text=f"vLLM {done.stdout.strip()} by {argv[0]}")


def _python_of(program: Path) -> Path | None:
    """The interpreter of a script with a plain ``#!`` line, or the program itself; ``None``: a wrapper."""
    if re.fullmatch(r"python[\d.]*", program.name):
        return program
    try:
        with program.open("rb") as file:
            first = file.readline(256).decode("utf-8", "replace")
    except OSError:
        return None
    found = re.match(r"#!\s*(\S*/python[\d.]*)\s*$", first)
    return Path(found[1]) if found else None


def driver() -> Check:
    """The NVIDIA driver."""
    version = devices.driver_version()
    if version is None:
        hint = "vLLM for the CPU, `--engine sim`, or install the driver (in a container: run it with the GPUs)"
        return Check(name="driver", status="note", text="no NVIDIA driver: no GPU can be used", hint=hint)
    return Check(name="driver", status="ok", text=f"NVIDIA {version}")


def gpu(found: devices.Gpu) -> Check:
    """One GPU: memory in use, and by whom."""
    known = {process.pid: words(process) for process in processes(found.owners)}
    owners = ", ".join(known.get(pid, f"pid {pid}, not visible here") for pid in found.owners)
    text = f"{found.name}: {found.used_bytes / GIB:.1f} of {found.total_bytes / GIB:.1f} GiB in use"
    name = f"GPU {found.index}"
    if found.used_bytes < OTHERS_BYTES and not found.owners:
        return Check(name=name, status="ok", text=text)
    hint = "end what holds it, or choose other GPUs with --devices"
    return Check(name=name, status="note", text=f"{text} by {owners or 'processes that NVML does not show'}", hint=hint)


def locks(gpus: Sequence[devices.Gpu], studies: Path, environment: Mapping[str, str]) -> Check:
    """Who holds GPUs or studies."""
    try:
        folder = devices.lock_folder(environment)
    except AutotuneError as error:
        return Check(name="locks", status="missing", text=error.message, hint=error.hint)
    of_gpus = [(f"GPU {g.index}", devices.holder(folder / f"{g.uuid}.lock")) for g in gpus]
    of_studies = [(f"study {p.parent.name}", devices.holder(p)) for p in sorted(studies.glob("*/lock"))]
    held = [f"{what} is held by {who}" for what, who in (*of_gpus, *of_studies) if who is not None]
    if not held:
        return Check(name="locks", status="ok", text=f"nothing is held ({folder})")
    free = any(who is None for _, who in of_gpus) or not of_gpus
    hint = "wait for it, end it, or choose other GPUs with --devices"
    return Check(name="locks", status="note" if free else "missing", text="; ".join(held), hint=hint)


def disk(name: str, folder: Path, *, needed: bool = True) -> Check:
    """Free space of a folder that may not exist yet, and whether it can be written to."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    worst: Literal["missing", "note"] = "missing" if needed else "note"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written to"
        return Check(name=name, status=worst, text=text, hint="change its permissions, or name another folder")
    free = shutil.disk_usage(place).free
    text = f"{folder}: {free / GIB:.1f} GiB free"
    if free < LEAST_BYTES:
        return Check(name=name, status=worst, text=text, hint="free some disk, or name another folder")
    return Check(name=name, status="ok", text=text)


def caches(environment: Mapping[str, str]) -> list[Check]:
    """Where weights and compiled kernels are kept from one start to the next."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "/") / ".cache")
    home = Path(environment.get("HF_HOME") or cache / "huggingface")
    return [
        disk("weights", Path(environment.get("HF_HUB_CACHE") or home / "hub"), needed=False),
        disk("vLLM's cache", Path(environment.get("VLLM_CACHE_ROOT") or cache / "vllm"), needed=False),
    ]


def hub(environment: Mapping[str, str]) -> Check:
    """Whether weights and data sets can be fetched; whether there is a token, never which."""
    import httpx

    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME") or "/") / ".cache" / "huggingface")
    token = bool(environment.get("HF_TOKEN")) or (home / "token").is_file()
    said = "a token is set" if token else "no token"
    hint = "only what is in the cache, or a folder, can be served: --model FOLDER, --workload FILE.jsonl"
    if environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return Check(name="hub", status="note", text=f"not asked: HF_HUB_OFFLINE is set ({said})", hint=hint)
    address = environment.get("HF_ENDPOINT") or HUB
    try:
        host = httpx.URL(address).host  # alone: an address may hold a password
        httpx.head(address, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        text = f"the hub cannot be reached: {type(error).__name__} ({said})"
        return Check(name="hub", status="note", text=text, hint=hint)
    gated = None if token else "gated models and data sets (cais/hle) need HF_TOKEN"
    return Check(name="hub", status="ok", text=f"{host} answers ({said})", hint=gated)


def open_files() -> Check:
    """How many requests in flight the limit on open files allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Check(name="open files", status="ok", text="no limit")
    text = f"at most {hard:,}: {max(0, hard - SPARE_FILES):,} requests in flight"
    if hard - SPARE_FILES < 1024:
        return Check(name="open files", status="note", text=text, hint="raise it: ulimit -Hn 65536 (as root)")
    return Check(name="open files", status="ok", text=text)


def left_servers(studies: Path, *, clean: bool) -> Check:
    """Servers of ours that a killed run left."""
    attempts = sorted(studies.glob("*/attempts"))
    name = "left-over servers"
    try:
        lines = [line for folder in attempts for line in (end_left_over if clean else left_over)(folder)]
    except AutotuneError as error:
        return Check(name=name, status="note", text=error.message, hint=error.hint)
    if not lines:
        return Check(name=name, status="ok", text=f"none under {studies}")
    if clean:
        return Check(name=name, status="ok", text="; ".join(lines))
    return Check(name=name, status="note", text="; ".join(lines), hint="autotune doctor --clean ends them")


def client(ceiling: Ceiling) -> Check:
    """What the load generator carries here."""
    whole = f"not streamed {ceiling.whole_answers_per_s:,.0f} answers/s of {ANSWER_TOKENS:,} tokens"
    if ceiling.tokens_per_s is None:
        text = f"{ceiling.streams} streams are not held at the least rate tried; {whole}"
        hint = "this host is busy now, or too slow to measure with streams: do not ask for TTFT or ITL"
        return Check(name="client", status="note", text=text, hint=hint)
    text = (
        f"{ceiling.streams} streams are held at {ceiling.tokens_per_s:,.0f} output tokens/s "
        f"({ceiling.cpu_s_per_million_tokens:.1f} CPU s per million tokens, loop {1000 * ceiling.loop_lag_s:.0f} ms "
        f"late); {whole}"
    )
    hint = "ask for TTFT and ITL (streams) at up to half of that; throughput alone is measured without streams"
    return Check(name="client", status="ok", text=text, hint=hint)
