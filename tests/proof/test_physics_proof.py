"""The step model against the stats lines of real H200 servers (Qwen3-32B, vLLM 0.22.1): fitted, held out, carried over.

    python -m pytest -m proof tests/proof/test_physics_proof.py -s

A line covers ten seconds of one engine. It is steady when nothing waits and KV use is below 95 % in it and in the
line before, the number running is the same within 3 %, and no burst of prompts lies in it. Its context is the mean
of both ends. Lines with a full cache at both ends are saturated and shown apart: no limit is set on them. The limit
of what is held out is one on all held-out lines together; most of them are of 128 in flight, so each concurrency
has its own row as well.

What is held out is not new to the prior: the efficiencies in ``stepstart`` were read from these lines. The rows
"without prior" and "prior off centre" (drawn from its own stated width, ``DRAWS`` times) show what is left without
that knowledge.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import autotune
from autotune.hub import shipped
from autotune.physics.gpus import parse_gpus
from autotune.physics.model_card import ModelCard
from autotune.physics.stepfit import SATURATED_KV, StepWindow, fit, residuals
from autotune.physics.stepstart import from_card, transfer
from autotune.physics.steptime import StepModel

FIELD = Path(os.environ.get("AUTOTUNE_FIELD", Path(autotune.__file__).parents[2] / "shared" / "field"))
LINES = FIELD.parent / "facts" / "h200_lines.csv"

pytestmark = [pytest.mark.proof, pytest.mark.skipif(not LINES.exists(), reason=f"{LINES} is not there")]

STABLE, STABLE_FULL, BURST_TOKENS_PER_S = 0.03, 0.1, 2500.0
"""Change of the number running, also under preemption; prompt tokens per second from which a line holds a burst."""
HELD_OUT_LIMIT, DP2_LIMIT, TP2_LIMIT = 0.02, 0.06, 0.10
"""Median absolute error of the predicted rate."""
DRAWS = 40
CONCURRENCIES = (32, 64, 128)
CARD = ModelCard.from_config(shipped()["Qwen/Qwen3-32B"], "Qwen/Qwen3-32B")
HARDWARE = parse_gpus("2xH200")
LENGTHS = {"max_model_len": 16384, "max_num_seqs": 512}


@dataclass(frozen=True)
class SetUp:
    """Flags of a server, and the KV tokens that one engine of it logged."""

    settings: Mapping[str, object]
    kv_tokens: int


SETUPS = {
    "tp1_bf16": SetUp(LENGTHS, 269_312),
    "dp2_bf16": SetUp({**LENGTHS, "data_parallel_size": 2}, 269_312),
    "tp2_bf16": SetUp({**LENGTHS, "tensor_parallel_size": 2}, 791_312),
    "tp1_fp8kv": SetUp({**LENGTHS, "kv_cache_dtype": "fp8"}, 538_624),
    "tp1_fp8w_fp8kv": SetUp({**LENGTHS, "kv_cache_dtype": "fp8", "quantization": "fp8"}, 775_872),
}


@dataclass(frozen=True)
class Seen:
    """The lines of one set-up, all engines."""

    steady: list[StepWindow]
    saturated: list[StepWindow]


def read() -> dict[str, Seen]:
    engines: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with LINES.open(newline="") as file:
        for row in csv.DictReader(file):
            engines[row["setup"], row["engine"]].append(row)
    seen = {name: Seen([], []) for name in SETUPS}
    for (name, _), rows in engines.items():
        for before, after in itertools.pairwise(rows):
            window = window_of(before, after, SETUPS[name].kv_tokens)
            if window is not None:
                (seen[name].saturated if window.saturated else seen[name].steady).append(window)
    return seen


def window_of(before: Mapping[str, str], after: Mapping[str, str], kv_tokens: int) -> StepWindow | None:
    """One line with the ends of its ten seconds; ``None``: it is in motion."""
    running = [float(row["running"]) for row in (before, after)]
    usage = [float(row["kv_usage"]) for row in (before, after)]
    waiting = max(float(row["waiting"]) for row in (before, after))
    full, stable = min(usage) >= SATURATED_KV, abs(running[1] - running[0]) / max(1.0, running[1])
    prompts, rate = float(after["prompt_tokens_per_s"]), float(after["output_tokens_per_s"])
    if not running[1] or not rate or prompts > BURST_TOKENS_PER_S or stable > (STABLE_FULL if full else STABLE):
        return None
    if not full and (waiting > 0 or max(usage) >= SATURATED_KV):
        return None
    return StepWindow(
        batch=statistics.fmean(running),
        kv_tokens=statistics.fmean(usage) * kv_tokens,
        output_tokens_per_s=rate,
        prompt_tokens_per_s=prompts,
        kv_usage=max(usage),
        waiting=waiting,
    )


def concurrency(window: StepWindow) -> int:
    """The load that the line belongs to: 32, 64 or 128 in flight."""
    return round(window.batch / 32) * 32


def without(windows: Sequence[StepWindow], out: int, prior: StepModel | None) -> tuple[list[StepWindow], list[float]]:
    """The lines of one concurrency, and the errors of a fit to the others."""
    held = [w for w in windows if concurrency(w) == out]
    return held, errors(fit([w for w in windows if concurrency(w) != out], prior), held)


def off_centre(windows: Sequence[StepWindow], prior: StepModel, seed: int) -> list[float]:
    """Errors of what is held out in turn, by a prior as wide as ``prior`` whose centre is drawn from it."""
    drawn = prior.draw(random.Random(seed))
    moved = dataclasses.replace(drawn, log_covariance=prior.log_covariance, noise=prior.noise)
    return [error for out in CONCURRENCIES for error in without(windows, out, moved)[1]]


def errors(model: StepModel, windows: Sequence[StepWindow]) -> list[float]:
    """Predicted over measured rate, less one."""
    return [math.exp(-r) - 1 for r in residuals(model, windows)]


def typical(found: Sequence[float]) -> float:
    """Median absolute error."""
    return statistics.median(map(abs, found))


def row(name: str, windows: Sequence[StepWindow], found: Sequence[float], limit: float | None) -> str:
    each = " ".join(f"{w.batch:.0f}:{e:+.1%}" for w, e in zip(windows, found, strict=True)) if len(found) <= 4 else ""
    return (
        f"| {name} | {len(found)} | {typical(found):.2%} | {statistics.fmean(found):+.2%} | {min(found):+.1%} .. "
        f"{max(found):+.1%} | {'' if limit is None else f'{limit:.0%}'} | {each} |"
    )


def test_rates_are_predicted_from_one_set_up() -> None:
    seen = read()
    ours = seen["tp1_bf16"].steady
    start = from_card(CARD, HARDWARE, SETUPS["tp1_bf16"].settings)
    fitted = fit(ours, start)
    assert {concurrency(w) for w in ours} == set(CONCURRENCIES)
    lines = [row("TP 1, start values (from these lines)", ours, errors(start, ours), None)]
    lines.append(row("TP 1, in sample", ours, errors(fitted, ours), None))
    held_out = []
    for out in CONCURRENCIES:
        windows, found = without(ours, out, start)
        held_out += found
        lines.append(row(f"TP 1, {out} in flight held out", windows, found, None))
    lines.append(row("TP 1, each held out in turn", ours, held_out, HELD_OUT_LIMIT))
    free = [error for out in CONCURRENCIES for error in without(ours, out, None)[1]]
    lines.append(row("TP 1, each held out, without prior", ours, free, None))
    off = [off_centre(ours, start, seed) for seed in range(DRAWS)]
    lines.append(row("TP 1, each held out, prior off centre", [], [e for found in off for e in found], None))
    share = sum(typical(found) <= HELD_OUT_LIMIT for found in off) / DRAWS
    limits = {"dp2_bf16": DP2_LIMIT, "tp2_bf16": TP2_LIMIT}
    carried = {}
    for name, setup in SETUPS.items():
        moved = transfer(fitted, SETUPS["tp1_bf16"].settings, setup.settings, CARD, HARDWARE)
        if seen[name].steady and name != "tp1_bf16":
            carried[name] = errors(moved, seen[name].steady)
            lines.append(row(f"{name} from TP 1", seen[name].steady, carried[name], limits.get(name)))
    for name, setup in SETUPS.items():
        moved = transfer(fitted, SETUPS["tp1_bf16"].settings, setup.settings, CARD, HARDWARE)
        if seen[name].saturated:
            found = errors(moved, seen[name].saturated)
            lines.append(row(f"{name}, saturated", seen[name].saturated, found, None))
    print(
        "\n\nPredicted over measured output tokens/s, less one; lines of ten seconds of one engine\n"
        f"Fitted: t0 {fitted.t0_s * 1e3:.2f} ms, sequence {fitted.sequence_s * 1e6:.1f} us, "
        f"KV {fitted.kv_token_s * 1e9:.1f} ns/token, prefill {fitted.prefill_token_s * 1e6:.0f} us/token, "
        f"noise {fitted.noise:.2%}\n\n"
        "| set-up | lines | median abs. error | mean | range | limit | batch:error |\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(lines))
    print(f"\nOff-centre priors with a median error within {HELD_OUT_LIMIT:.0%}: {share:.0%} of {DRAWS}")
    assert typical(held_out) <= HELD_OUT_LIMIT
    assert typical(carried["dp2_bf16"]) <= DP2_LIMIT
    assert typical(carried["tp2_bf16"]) <= TP2_LIMIT
