"""The cost card: what ``autotune plan`` prints before any GPU is touched, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.physics.advice import advise_when_nothing_fits
from autotune.physics.gpus import GIB
from autotune.physics.layout import whole
from autotune.physics.memory import adjusted
from autotune.planning.knowledge import Knowledge
from autotune.planning.ranking import PlannedRun, Prediction
from autotune.records.settings import Settings

SCHEMA = "autotune/plan/1"
REASONS = 3
"""Most reasons that are told where every layout is refused for its own."""


def plan_data(knowledge: Knowledge, predictions: Sequence[Prediction], fixed: Settings) -> dict[str, Any]:
    """The object of ``plan --json``; model and arithmetic as the ``fixed`` flags load it."""
    card, hardware = adjusted(knowledge.card, fixed), knowledge.hardware
    return {
        "schema": SCHEMA,
        "model": {
            "parameters": card.parameters,
            "weight_bytes": card.weight_bytes(),
            "kv_bytes_per_token": round(card.kv_bytes_per_token(str(fixed.get("kv_cache_dtype") or "auto"))),
        },
        "gpus": {
            "name": hardware.gpu.name,
            "count": hardware.count,
            "memory_bytes": hardware.gpu.memory_bytes,
            "bandwidth_bytes_per_s": hardware.gpu.bandwidth_bytes_per_s,
            "flops_per_s": hardware.gpu.bf16_flops_per_s,
        },
        "candidates": [
            {
                "settings": prediction.settings.to_data(),
                "fits": prediction.fits,
                "reason": prediction.reason,
                "engines": prediction.engines,
                "kv_capacity_tokens": prediction.kv_capacity_tokens,
                "concurrency": prediction.concurrency,
                "output_tokens_per_s": prediction.output_tokens_per_s,
                "makespan_s": prediction.makespan_s,
                "low_s": prediction.low_s,
                "high_s": prediction.high_s,
                "bottleneck": prediction.bottleneck,
            }
            for prediction in predictions
        ],
    }


def plan_text(knowledge: Knowledge, predictions: Sequence[Prediction], fixed: Settings, run: PlannedRun) -> str:
    """The same for people: what the model needs, what fits, what to expect, and what is only a guess."""
    data = plan_data(knowledge, predictions, fixed)
    model, gpu, answers = data["model"], knowledge.hardware.gpu, run.answers.law
    cut = f", {answers.cut_share:.0%} of them cut at {answers.max_tokens:,}" if answers.max_tokens else ""
    lines = [
        f"{knowledge.card.name}: {model['parameters'] / 1e9:.1f} billion parameters, weights "
        f"{model['weight_bytes'] / GIB:.1f} GiB, KV cache {model['kv_bytes_per_token'] / 1024:,.0f} KiB a token, "
        f"longest context {knowledge.card.max_model_len:,}",
        f"{knowledge.hardware.name}: each {gpu.memory_bytes / GIB:.1f} GiB, "
        f"{gpu.bandwidth_bytes_per_s / 1e12:.2f} TB/s, {gpu.bf16_flops_per_s / 1e12:.0f} TFLOP/s",
        f"run: {run.requests:,} requests, prompts of {run.prompts.mean:,.0f} tokens, answers of {answers.mean:,.0f} "
        f"({answers.source}){cut}",
        "",
    ]
    fitting = [prediction for prediction in predictions if prediction.fits]
    if fitting:
        rows: list[tuple[str, ...]] = [("TP", "DP", "KV tokens", "in flight", "tokens/s", "makespan (95 %)", "limit")]
        rows += [_row(prediction) for prediction in fitting]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        guesses = knowledge.model(fitting[0].settings).guesses
        if guesses:
            lines += ["", f"not measured here, physics only: {', '.join(guesses)}"]
    refused = [prediction for prediction in predictions if not prediction.fits]
    if refused:
        lines += ["", "does not fit:"] if fitting else ["does not fit:"]
        lines += [f"  TP {p.settings['tensor_parallel_size']} x DP {_dp(p)}: {p.reason}" for p in refused]
    return "\n".join(lines) + "\n"


def what_would_fit(knowledge: Knowledge, predictions: Sequence[Prediction], fixed: Settings) -> list[str]:
    """Where nothing fits: what would, or, where the flags themselves are refused, why.

    Raises:
        InputError: no memory of the cards is free at all.
    """
    by_layout = [prediction for prediction in predictions if not knowledge.fit(prediction.settings).breakdown.weights]
    if len(by_layout) == len(predictions):
        return list(dict.fromkeys(str(prediction.reason) for prediction in by_layout))[:REASONS]
    length = whole(fixed, "max_model_len", knowledge.card.max_model_len)
    return list(advise_when_nothing_fits(knowledge.card, knowledge.hardware, length, fixed, knowledge.memory).lines)


def _row(prediction: Prediction) -> tuple[str, ...]:
    return (
        str(prediction.settings["tensor_parallel_size"]),
        _dp(prediction),
        f"{prediction.kv_capacity_tokens:,}",
        f"{prediction.concurrency:,}",
        f"{prediction.output_tokens_per_s:,.0f}",
        f"{_duration(prediction.makespan_s)} ({_duration(prediction.low_s)} to {_duration(prediction.high_s)})",
        str(prediction.bottleneck),
    )


def _dp(prediction: Prediction) -> str:
    return str(prediction.settings["data_parallel_size"])


def _duration(seconds: float | None) -> str:
    """``34 min``, ``6.5 h``; seconds under two minutes."""
    if seconds is None:
        return "?"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
