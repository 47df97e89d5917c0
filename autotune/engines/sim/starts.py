"""Starts of simulated servers: what vLLM would refuse and in which words, what a start costs, which came before."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path

from autotune.engines.diagnosis import diagnose
from autotune.engines.sim.world import Truth
from autotune.physics.gpus import GIB, Hardware
from autotune.physics.layout import Layout, read_layout
from autotune.physics.memory import MemoryModel, adjusted
from autotune.physics.model_card import ModelCard
from autotune.physics.startup import PROCESS_S, load_s
from autotune.records.observation import Failure
from autotune.records.settings import Settings

STARTS_FILE = "sim-starts.jsonl"
"""In an attempt's folder: its starts. Together with its neighbours': the compile cache of the study."""


def refusal(card: ModelCard, hardware: Hardware, settings: Settings, truth: Truth) -> tuple[Failure, float] | None:
    """Why a server with these flags does not start, and after how many seconds; ``None``: it starts.

    The failure is read from a line in vLLM's words by the reader of real logs, so kind and hint are the same.
    """
    layout = read_layout(settings, adjusted(card, settings), hardware.gpu, MemoryModel().rules)
    line = _config_line(card, hardware, layout)
    if line is not None:
        return _failure(line), PROCESS_S / 2
    if truth.fit.fits:
        return None
    if truth.fit.breakdown.weights == 0:  # the layout itself is refused, and no text of vLLM is known for it
        return Failure(kind="bad_flag", line=f"ValueError: {truth.fit.reason}"), PROCESS_S / 2
    seconds = load_s(card, hardware, settings)
    line = _memory_line(hardware, layout, truth)
    return _failure(line), PROCESS_S if "on startup" in line else seconds


class Starts:
    """The starts of one study so far, kept in the attempts' folders, so that a second run finds them.

    Args:
        folder: of this attempt; ``None``: only the starts of this object are known.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._own: list[tuple[str, str]] = []

    def add(self, settings: Settings, key: Hashable) -> tuple[int, bool]:
        """Count a start: how often these settings were started before, and whether their code was compiled."""
        known, code = self._known(), repr(key)
        line = (settings.fingerprint, code)
        self._own.append(line)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / STARTS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return sum(name == settings.fingerprint for name, _ in known), any(other == code for _, other in known)

    def _known(self) -> list[tuple[str, str]]:
        if self._folder is None:
            return list(self._own)
        found = []
        for path in sorted(self._folder.absolute().parent.glob(f"*/{STARTS_FILE}")):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, code = json.loads(line)
                found.append((name, code))
        return found


def out_of_memory(hardware: Hardware) -> Failure:
    """The death of a server that was given too much of the memory, under load."""
    total = hardware.gpu.memory_bytes / GIB
    return _failure(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of which 412.00 MiB is free.",
        ready=True,
    )


def _failure(line: str, *, ready: bool = False) -> Failure:
    found = diagnose([f"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] {line}"], exit_code=1, ready=ready)
    return found or Failure(kind="unknown", line=line)


def _config_line(card: ModelCard, hardware: Hardware, layout: Layout) -> str | None:
    """What vLLM's configuration refuses before anything is loaded."""
    if layout.max_num_batched_tokens < layout.max_num_seqs:
        return (
            f"ValueError: max_num_batched_tokens ({layout.max_num_batched_tokens}) must be greater than or equal to "
            f"max_num_seqs ({layout.max_num_seqs})."
        )
    if layout.max_model_len > card.max_model_len and not layout.scaled:
        return (
            f"ValueError: User-specified max_model_len ({layout.max_model_len}) is greater than the derived "
            f"max_model_len (max_position_embeddings={card.max_model_len} in model's config.json)."
        )
    if card.heads % layout.tp:
        return (
            f"ValueError: Total number of attention heads ({card.heads}) must be divisible by tensor parallel size "
            f"({layout.tp})."
        )
    problem = card.tp_problem(layout.tp, layout.dp, layout.expert_parallel)
    if problem is not None:
        return f"AssertionError: {problem} (sizes must be divisible by tensor parallel size)"
    if layout.expert_parallel and not card.experts:
        return "ValueError: Number of experts in the model must be greater than 0 when expert parallelism is enabled."
    if layout.engine_gpus > hardware.count:
        return (
            f"ValueError: World size ({layout.engine_gpus}) is larger than the number of available GPUs "
            f"({hardware.count}) in this node."
        )
    if layout.gpus > hardware.count:
        return f"AssertionError: DP adjusted local rank {hardware.count} is out of bounds for {hardware.count} devices."
    return None


def _memory_line(hardware: Hardware, layout: Layout, truth: Truth) -> str:
    """What the worker says when weights or cache do not fit."""
    found = truth.fit.breakdown
    total, free = found.total / GIB, hardware.free_bytes / GIB
    if hardware.free_bytes < found.requested and layout.kv_cache_memory_bytes is None:
        return (
            f"ValueError: Free memory on device cuda:0 ({free:.2f}/{total:.2f} GiB) on startup is less than desired "
            f"GPU memory utilization ({layout.gpu_memory_utilization}, {found.requested / GIB:.2f} GiB)."
        )
    if found.weights > hardware.free_bytes:
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {found.weights / GIB / 64:.2f} GiB. GPU 0 "
            f"has a total capacity of {total:.2f} GiB."
        )
    if found.kv <= 0 or truth.fit.longest_model_len == 0:
        return "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    if truth.fit.longest_model_len < layout.max_model_len:
        return (
            f"ValueError: To serve at least one request with the model's max seq len ({layout.max_model_len}), more "
            f"KV cache is needed than the available KV cache memory ({found.kv / GIB:.2f} GiB). Based on the available "
            f"memory, the estimated maximum model length is {truth.fit.longest_model_len}."
        )
    return f"ValueError: {truth.fit.reason}"
