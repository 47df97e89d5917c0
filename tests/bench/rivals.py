"""The load generators that ours is measured against: where they are installed, and the command line of one load.

    python tests/bench/rivals.py        # installs guidellm and aiperf, each into a virtual environment of its own

``vllm bench serve`` comes with the CPU vLLM of ``tests/real_vllm/cpu_vllm.py``. Each is asked for what its manual
recommends for a closed loop, streamed, with as little beside it as it allows (no tables on screen, no scraping of
the server, tokens counted by the server).
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench import vllm_bench
from tests.bench.vllm_bench import Prompt
from tests.real_vllm import cpu_vllm

VERSIONS = {"guidellm": "0.8.1", "aiperf": "0.13.0"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """One closed loop on one null server."""

    base_url: str
    model: str
    concurrency: int
    prompts: list[Prompt]
    folder: Path
    """For what the client writes."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """One load generator."""

    name: str
    version: str | None
    """``None``: not installed here."""
    argv: Callable[[Load], list[str]]
    offline: bool = True
    """Told not to ask the hub."""

    def environment(self) -> dict[str, str]:
        environment = vllm_bench.environment()
        if not self.offline:
            del environment["HF_HUB_OFFLINE"]
        return environment


def python_of(package: str) -> Path:
    return cpu_vllm.ROOT / f".venv-bench-{package}" / "bin" / "python"


def installed_version(package: str) -> str | None:
    packages = next((python_of(package).parents[1] / "lib").glob("python3*/site-packages"), None)
    found = list(importlib.metadata.distributions(name=package, path=[str(packages)]))
    return found[0].version if packages is not None and found else None


def ours(*, stream: bool) -> Client:
    def argv(load: Load) -> list[str]:
        data = load.folder / "ours.json"
        vllm_bench.write_dataset(data, load.prompts)
        return [
            *(sys.executable, "-m", "tests.bench.ours", "--base-url", load.base_url, "--model", load.model),
            *("--concurrency", str(load.concurrency), "--dataset", str(data), *(["--stream"] if stream else [])),
        ]

    name = "autotune" if stream else "autotune, not streamed"
    return Client(name=name, version=importlib.metadata.version("vllm-autotune"), argv=argv)


def bench_serve() -> Client:
    paths = cpu_vllm.paths()

    def argv(load: Load) -> list[str]:
        assert paths is not None
        return vllm_bench.command(
            paths.vllm,
            base_url=load.base_url,
            model=load.model,
            tokenizer=paths.model,
            dataset=vllm_bench.write_dataset(load.folder / "sharegpt.json", load.prompts),
            requests=len(load.prompts),
            concurrency=load.concurrency,
            out=load.folder / "vllm.json",
        )

    return Client(name="vllm bench serve", version=cpu_vllm.VLLM_VERSION if paths else None, argv=argv)


def guidellm() -> Client:
    def argv(load: Load) -> list[str]:
        return [
            *(str(python_of("guidellm").with_name("guidellm")), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={load.base_url},model={load.model}"),
            *("--profile", f"kind=concurrent,streams={load.concurrency}"),
            *("--constraint", f"kind=max_requests,count={len(load.prompts)}"),
            *("--tokenizer", f"kind=huggingface_auto,model={cpu_vllm.MODEL}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=64"),
            *("--output", f"kind=json,path={load.folder / 'guidellm.json'}"),
        ]

    return Client(name="guidellm", version=installed_version("guidellm"), argv=argv)


def aiperf() -> Client:
    def argv(load: Load) -> list[str]:
        return [
            *(str(python_of("aiperf").with_name("aiperf")), "profile", "-m", load.model, "-u", load.base_url),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", str(load.concurrency)),
            *("--request-count", str(len(load.prompts)), "--tokenizer", str(cpu_vllm.MODEL)),
            *("--prompt-input-tokens-mean", "24", "--prompt-output-tokens-mean", "64", "--use-server-token-count"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--export-level", "summary"),
            *("--output-artifact-dir", str(load.folder / "aiperf")),
        ]

    # Told to be offline, it looks for a tokenizer in the hub's cache only, not in a folder.
    return Client(name="aiperf", version=installed_version("aiperf"), argv=argv, offline=False)


def clients() -> list[Client]:
    """In the order of the table."""
    return [ours(stream=True), bench_serve(), guidellm(), aiperf(), ours(stream=False)]


def install(package: str) -> None:
    """A virtual environment with one of them; at once where it is there."""
    if installed_version(package) == VERSIONS[package]:
        return
    venv = python_of(package).parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    subprocess.run(
        [str(python_of(package)), "-m", "pip", "install", "-q", f"{package}=={VERSIONS[package]}"], check=True
    )


if __name__ == "__main__":
    for wanted in VERSIONS:
        install(wanted)
        print(f"{wanted} {installed_version(wanted)}")
