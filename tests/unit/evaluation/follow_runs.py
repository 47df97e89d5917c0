"""Small runs played on a token clock, and the lines, pages and tables that a server writes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.evaluation.follow_series import Reading

PROMPT = 200
TICK_S = 0.5


@dataclass(frozen=True)
class Row:
    t_s: float
    prompt_tps: float
    gen_tps: float
    running: int
    waiting: int
    kv: float
    """0..1."""
    ended: int


@dataclass(frozen=True)
class Played:
    rows: tuple[Row, ...]
    """One every 10 s, the last one with nothing in flight."""
    end_s: float
    full_at_s: float | None
    lengths: tuple[int, ...]


def played(
    requests: int = 160,
    *,
    concurrency: int | None = None,
    seqs: int = 10_000,
    max_tokens: int = 4000,
    capacity: float = 2e6,
    median: float = 1500.0,
    seed: int = 1,
) -> Played:
    """All sequences advance together; the newest wait when the cache is full.

    Args:
        concurrency: what the client holds in flight; ``None``: everything is sent at once.
        seqs: so many run at most.
    """
    rng = np.random.default_rng(seed)
    lengths = np.minimum(max_tokens, rng.lognormal(np.log(median), 0.7, requests)).astype(int) + 1
    ages: dict[int, float] = {}
    sent, t, ended, written, prompts = 0, 0.0, 0, 0.0, 0.0
    started: set[int] = set()
    rows: list[Row] = []
    full_at = None
    while True:
        while sent < requests and len(ages) < (concurrency or requests):
            ages[sent] = 0.0
            sent += 1
        running = _running(ages, capacity, seqs)
        if t > 0 and (t % 10 == 0 or not ages):
            full = len(running) < min(len(ages), seqs)
            share = 0.999 if full else sum(ages[i] + PROMPT for i in running) / capacity
            at = float(np.ceil(t / 10) * 10)
            rows.append(Row(at, prompts / 10, written / 10, len(running), len(ages) - len(running), share, ended))
            ended, written, prompts = 0, 0.0, 0.0
            full_at = t if full and full_at is None else full_at
        if not ages:
            return Played(tuple(rows), t, full_at, tuple(int(n) for n in lengths))
        prompts += PROMPT * len(set(running) - started)
        started.update(running)
        step = TICK_S / (0.02 + 5e-5 * len(running) + 1e-8 * sum(ages[i] + PROMPT for i in running))
        for i in running:
            written += min(step, float(lengths[i]) - ages[i])
            ages[i] += step
            if ages[i] >= lengths[i]:
                del ages[i]
                ended += 1
        t += TICK_S


def _running(ages: dict[int, float], capacity: float, seqs: int) -> list[int]:
    """The first ones sent, as far as the cache and the limit go."""
    running: list[int] = []
    held = 0.0
    for i, age in ages.items():
        held += age + PROMPT
        if held > capacity or len(running) >= seqs:
            break
        running.append(i)
    return running


def readings(rows: Sequence[Row], *, ends: bool = False, prompts: bool = True, kv: bool = True) -> tuple[Reading, ...]:
    return tuple(
        Reading(
            t_s=row.t_s,
            span_s=10.0,
            output_tokens=row.gen_tps * 10,
            running=row.running,
            waiting=row.waiting,
            kv_usage=row.kv if kv else None,
            kv_highest=row.kv if kv else None,
            prompt_tokens=row.prompt_tps * 10 if prompts else None,
            completions=row.ended if ends else None,
        )
        for row in rows
    )


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    lines = ["t_s,prompt_tps,gen_tps,running,waiting,kv_pct"]
    lines += [f"{r.t_s},{r.prompt_tps},{r.gen_tps},{r.running},{r.waiting},{100 * r.kv:.1f}" for r in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def stamp(t_s: float) -> str:
    return f"03-04 {10 + int(t_s) // 3600:02d}:{int(t_s) // 60 % 60:02d}:{int(t_s) % 60:02d}"


def log_line(row: Row, engine: int = 0) -> str:
    return (
        f"INFO {stamp(row.t_s)} [loggers.py:127] Engine {engine:03d}:"
        f" Avg prompt throughput: {row.prompt_tps:.1f} tokens/s,"
        f" Avg generation throughput: {row.gen_tps:.1f} tokens/s, Running: {row.running} reqs,"
        f" Waiting: {row.waiting} reqs, GPU KV cache usage: {100 * row.kv:.1f}%, Prefix cache hit rate: 0.0%"
    )


def write_log(path: Path, rows: Sequence[Row], *, capacity: float = 2e6, engines: int = 1) -> Path:
    lines = [f"INFO {stamp(0)} [kv_cache_utils.py:829] GPU KV cache size: {capacity:,.0f} tokens"]
    lines += [log_line(row, engine) for row in rows for engine in range(engines)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_scrapes(path: Path, rows: Sequence[Row], start: float = 1.7e9) -> Path:
    lines, total, prompts = [scrape_line(start, 0, 0, 0, 0, 0.0)], 0.0, 0.0
    for row in rows:
        total += row.gen_tps * 10
        prompts += row.prompt_tps * 10
        lines.append(scrape_line(start + row.t_s, round(total), round(prompts), row.running, row.waiting, row.kv))
    path.write_text("\n".join(lines) + "\n")
    return path


def scrape_line(t: float, tokens: int | None, prompts: int | None, running: int | None, waiting: int, kv: float) -> str:
    return json.dumps(
        {
            "schema": "autotune/scrape/1",
            "t": t,
            "generation_tokens_total": tokens,
            "prompt_tokens_total": prompts,
            "kv_usage_max": kv,
            "running": running,
            "waiting": waiting,
            "engines": 1,
        }
    )


def page(tokens: float, prompts: float, row: Row | None) -> str:
    running, waiting, kv = (row.running, row.waiting, row.kv) if row else (0, 0, 0.0)
    tags = '{engine="0",model_name="m"}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{tags} {running}\n"
        f"vllm:num_requests_waiting{tags} {waiting}\nvllm:kv_cache_usage_perc{tags} {kv}\n"
        f"vllm:generation_tokens_total{tags} {tokens}\nvllm:prompt_tokens_total{tags} {prompts}\n"
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="125000"} 1.0\n'
    )


def write_pages(folder: Path, rows: Sequence[Row]) -> list[Path]:
    tokens = prompts = 0.0
    paths = [folder / "page-0.txt"]
    paths[0].write_text(page(0, 0, None))
    for row in rows:
        tokens += row.gen_tps * 10
        prompts += row.prompt_tps * 10
        paths.append(folder / f"page-{row.t_s:.0f}.txt")
        paths[-1].write_text(page(tokens, prompts, row))
    return paths
