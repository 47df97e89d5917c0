"""``vllm bench serve`` of the installed vLLM: its command line, and what its result file says of each token."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a load: what is asked, and the forced length of the answer."""

    text: str
    output_tokens: int


def write_dataset(path: Path, prompts: list[Prompt]) -> Path:
    """Its ``sharegpt`` data set: the length of the second turn is the forced length (" a" is one token).

    Its ``custom`` data set would say the length itself, but needs pandas, which vLLM does not bring.
    """
    turns = [[{"value": prompt.text}, {"value": " a" * prompt.output_tokens}] for prompt in prompts]
    path.write_text(json.dumps([{"conversations": conversation} for conversation in turns]))
    return path


def command(
    vllm: Path, *, base_url: str, model: str, tokenizer: Path, dataset: Path, requests: int, concurrency: int, out: Path
) -> list[str]:
    """A closed loop over the data set in its order, streamed, every answer at its forced length."""
    return [
        *(str(vllm), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", base_url, "--model", model, "--served-model-name", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "sharegpt", "--dataset-path", str(dataset), "--disable-shuffle", "--no-oversample"),
        *("--num-prompts", str(requests), "--max-concurrency", str(concurrency), "--ignore-eos"),
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def environment() -> dict[str, str]:
    """Without a hub: the tokenizer is a folder."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What its result file says."""

    completed: int
    failed: int
    output_tokens: int
    prompt_tokens: int
    """As the server counted them."""
    lengths: list[int]
    """Output tokens of each answer, in the order of the data set."""
    duration_s: float
    token_times: list[tuple[float, float]]
    """Clock of ``time.perf_counter()`` (one for the whole machine) and tokens that had arrived by then."""

    @property
    def output_tokens_per_s(self) -> float:
        """As it prints it: ramp and tail included."""
        return self.output_tokens / self.duration_s


def run(argv: list[str], out: Path, *, timeout_s: float) -> Result:
    """Run it to its end; a failure shows the end of what it printed."""
    done = subprocess.run(
        argv,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"vllm bench serve: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    return read_result(json.loads(out.read_text()))


def read_result(data: dict[str, Any]) -> Result:
    """Its JSON (``--save-detailed``). A chunk that carries several tokens is spread over them."""
    arrivals: list[tuple[float, float]] = []
    for start, ttft, gaps, tokens in zip(
        data["start_times"], data["ttfts"], data["itls"], data["output_lens"], strict=True
    ):
        now, each = start + ttft, tokens / (len(gaps) + 1)
        arrivals.append((now, each))
        for gap in gaps:
            now += gap
            arrivals.append((now, each))
    total, times = 0.0, []
    for now, tokens in sorted(arrivals):
        total += tokens
        times.append((now, total))
    return Result(
        completed=data["completed"],
        failed=data["failed"],
        output_tokens=data["total_output_tokens"],
        prompt_tokens=sum(data["input_lens"]),
        lengths=data["output_lens"],
        duration_s=data["duration"],
        token_times=times,
    )
