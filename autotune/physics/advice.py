"""When nothing fits: the least number of GPUs, the longest context, and which smaller weights would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.gpus import GIB, Hardware
from autotune.physics.layout import read_layout
from autotune.physics.memory import Fit, MemoryModel, fits
from autotune.physics.model_card import ModelCard
from autotune.physics.quantization import Quantization

_MOST_GPUS = 64
_SHORTEST = 1024  # a shorter context is of no use
# Four bits with a 16-bit scale and a packed zero point for each 128 weights, as AWQ and GPTQ checkpoints have them.
_FOUR_BIT = Quantization(method="4-bit", bytes_each=0.5 + 2.5 / 128, aligned=128)
_EIGHT_BIT = Quantization(method="fp8", bytes_each=1.0)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would fit."""

    least_gpus: int | None
    """Fewest of these cards on which the model as it is serves ``max_model_len``, one engine (so the least TP too).
    None: not with up to 64."""
    longest_model_len: int
    """Largest max_model_len on the hardware as it is, over the layouts that divide the model; 0: none."""
    gpu_memory_utilization: float
    """Share of each card that these answers use: the flag's, or what others leave free."""
    fp8_kv: bool
    """Fits with ``kv_cache_dtype=fp8`` alone."""
    fp8_weights: bool
    """Fits with 8-bit weights (``quantization=fp8`` while loading, or such a checkpoint)."""
    four_bit_weights: bool
    """Fits with a 4-bit checkpoint of the model (AWQ, GPTQ)."""
    lines: tuple[str, ...]
    """The same in words, most useful first."""


def advise_when_nothing_fits(
    card: ModelCard,
    hardware: Hardware,
    max_model_len: int,
    settings: Mapping[str, object] | None = None,
    memory: MemoryModel | None = None,
) -> Advice:
    """What would let ``card`` serve ``max_model_len`` tokens on cards like these.

    ``settings`` are flags kept as they are (parallel sizes in them are ignored). Memory held by others
    (``hardware.used_bytes``, a display) lowers the share that is asked for.

    Raises:
        InputError: a flag that is no number where one is needed.
    """
    memory = memory or MemoryModel()
    wanted = read_layout(settings or {}, card, hardware.gpu, memory.rules).gpu_memory_utilization
    share = usable_share(hardware, wanted)
    if share <= 0:
        raise InputError(
            f"nothing of the memory of {hardware.name} is free", hint="end what holds it, or name other cards"
        )
    kept = {**(settings or {}), "gpu_memory_utilization": share, "max_model_len": max_model_len}
    kept = {name: value for name, value in kept.items() if not name.endswith("_parallel_size")}
    roomy = {**kept, "max_num_seqs": min(8, _seqs(card, hardware, kept, memory)), "max_num_batched_tokens": 2048}

    def serves(other: ModelCard, flags: Mapping[str, object], cards: Hardware) -> bool:
        return any(fit.fits for fit in _layouts(other, flags, cards, memory))

    least = next((n for n in range(1, _MOST_GPUS + 1) if _on(card, kept, hardware, n, memory).fits), None)
    longest = max((fit.longest_model_len for fit in _layouts(card, kept, hardware, memory)), default=0)
    plain = card.quantization is None
    smaller = {"kv_cache_dtype=fp8": (card, {**kept, "kv_cache_dtype": "fp8"})}
    if plain:
        smaller["fp8 weights (quantization=fp8)"] = (card.requantized(_EIGHT_BIT), kept)
        smaller["a 4-bit checkpoint (AWQ, GPTQ)"] = (card.requantized(_FOUR_BIT), kept)
    # What each change would serve at most; the length asked for may be too much for it, too.
    reached = {
        what: max((fit.longest_model_len for fit in _layouts(other, flags, hardware, memory)), default=0)
        for what, (other, flags) in smaller.items()
    }
    answers = {what: serves(*smaller[what], hardware) for what in smaller}
    lines = []
    if longest:
        lines.append(f"max_model_len up to {longest} fits on {hardware.name}")
    if least is not None and least > hardware.count:
        lines.append(
            f"{least} x {hardware.gpu.name} serve max_model_len {max_model_len} with tensor_parallel_size {least}"
        )
    lines += [f"{what} would fit" for what, would in answers.items() if would]
    lines += [
        f"{what} would fit with max_model_len up to {reached[what]}"
        for what, would in answers.items()
        if not would and reached[what] > max(longest, _SHORTEST)
    ]
    if serves(card, roomy, hardware):
        lines.append("max_num_seqs 8 and max_num_batched_tokens 2048 would fit")
    if share < wanted:
        lines.append(
            f"{hardware.used_bytes / GIB:.1f} GiB of each card are held by others: gpu_memory_utilization at most "
            f"{share:.2f}"
        )
    if not lines:
        lines.append(
            f"the weights alone take {card.weight_bytes() / GIB:.0f} GiB: take a smaller model or larger cards"
        )
    return Advice(
        least_gpus=least,
        longest_model_len=longest,
        gpu_memory_utilization=share,
        fp8_kv=answers["kv_cache_dtype=fp8"],
        fp8_weights=answers.get("fp8 weights (quantization=fp8)", False),
        four_bit_weights=answers.get("a 4-bit checkpoint (AWQ, GPTQ)", False),
        lines=tuple(lines),
    )


def usable_share(hardware: Hardware, wanted: float) -> float:
    """The largest ``gpu_memory_utilization`` up to ``wanted`` at which vLLM's start check passes, two decimals."""
    return min(wanted, math.floor(100 * hardware.free_bytes / hardware.gpu.memory_bytes) / 100)


def _seqs(card: ModelCard, hardware: Hardware, settings: Mapping[str, object], memory: MemoryModel) -> int:
    return read_layout(settings, card, hardware.gpu, memory.rules).max_num_seqs


def _on(card: ModelCard, flags: Mapping[str, object], hardware: Hardware, tp: int, memory: MemoryModel) -> Fit:
    return fits(card, hardware.with_count(tp), {**flags, "tensor_parallel_size": tp}, memory)


def _layouts(card: ModelCard, flags: Mapping[str, object], hardware: Hardware, memory: MemoryModel) -> list[Fit]:
    return [_on(card, flags, hardware, tp, memory) for tp in card.tp_choices(hardware.count)]
