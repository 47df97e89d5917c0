"""Bytes per weight: what ``quantization_config`` of a checkpoint says, and what vLLM quantizes while it loads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError
from autotune.physics.blocks import Weights
from autotune.physics.config_reader import ConfigReader

# Bytes per weight of methods without a choice of width. MX: 32 weights share one byte of scale; NVFP4: 16 do.
_FIXED = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "ptpc_fp8": 1.0,
    "fp8_per_tensor": 1.0,
    "fp8_per_block": 1.0,
    "deepspeedfp": 1.0,
    "experts_int8": 1.0,
    "tpu_int8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "gpt_oss_mxfp4": 0.5 + 1 / 32,
    "modelopt": 1.0,
    "modelopt_fp4": 0.5 + 1 / 16,
    "modelopt_mxfp8": 1.0 + 1 / 32,
    "petit_nvfp4": 0.5 + 1 / 16,
    "nvfp4": 0.5 + 1 / 16,
}
# Methods that --quantization applies to a 16-bit checkpoint while loading (vLLM docs, features/quantization).
_ONLINE = {
    "fp8": 1.0,
    "fp8_per_tensor": 1.0,
    "fp8_per_block": 1.0,
    "ptpc_fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "experts_int8": 1.0,
    "int8": 1.0,
    "tpu_int8": 1.0,
    "bitsandbytes": 0.5 + 4 / 64,
}
_ONLY_EXPERTS = ("mxfp4", "gpt_oss_mxfp4", "experts_int8")
# Where a layer's modules sit; multimodal checkpoints put the language model one level down.
_PLACES = (
    "model.layers.{}.",
    "language_model.model.layers.{}.",
    "model.language_model.layers.{}.",
    "backbone.layers.{}.",
)
# What checkpoints call the modules that we count under one name.
_LEAVES = {
    "mlp.up_proj": ("mlp.up_proj", "mlp.gate_up_proj"),
    "mlp.experts": ("mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w1", "feed_forward.experts.0.up_proj"),
    "mlp.shared_experts": ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj", "mlp.shared_mlp.up_proj"),
    "mixer.in_proj": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv", "mamba.in_proj", "mixer.in_proj"),
    "self_attn.kv_a_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attn.indexer": ("self_attn.indexer.wq_b",),
}


@dataclass(frozen=True)
class Quantization:
    """How the linear weights of one model are stored on the GPU."""

    method: str
    bytes_each: float
    """Bytes of one quantized weight, scales included."""
    kept: tuple[str, ...] = ()
    """Modules left in 16 bit: names, globs, and regular expressions after ``re:``."""
    only_experts: bool = False
    aligned: int = 1
    """Each GPU's slice of a feed-forward matrix must divide by it (fp8 blocks, 4-bit groups)."""
    kv_bytes: float | None = None
    """Bytes of a KV element when the checkpoint brings KV scales (``kv_cache_dtype`` auto follows it)."""
    expert_padding: int = 1
    """vLLM pads the hidden size of experts to a multiple of it."""

    def apply(self, weights: Weights, layer: int | None, hidden: int) -> Weights:
        """The weights as stored: quantized unless they are no matrix or the config keeps them."""
        if not weights.linear or (self.only_experts and weights.shard != "experts"):
            return weights
        if self.kept and self._keeps(weights.name, layer):
            return weights
        padded = 1.0
        if weights.shard == "experts" and self.expert_padding > 1:
            padded = -(-hidden // self.expert_padding) * self.expert_padding / hidden
        return dataclasses.replace(weights, bytes_each=self.bytes_each, padded=padded)

    def _keeps(self, name: str, layer: int | None) -> bool:
        rules = _rules(self.kept)
        return any(rules.match(spelled) for spelled in _spellings(name, layer))


@dataclass(frozen=True)
class _Rules:
    """A rule keeps a module when it names it, a module around it, or a part of its path."""

    named: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def match(self, name: str) -> bool:
        parts = name.split(".")
        around = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return bool(self.named & (around | set(parts))) or any(p.match(name) for p in self.patterns)


@functools.cache
def _rules(kept: tuple[str, ...]) -> _Rules:
    patterns = []
    for rule in kept:
        if not rule.startswith("re:") and "*" not in rule:
            continue
        expression = rule[3:] if rule.startswith("re:") else re.escape(rule).replace(r"\*", ".*") + r"(\.|\Z)"
        with contextlib.suppress(re.error):
            patterns.append(re.compile(expression))
    return _Rules(frozenset(kept), tuple(patterns))


def _spellings(name: str, layer: int | None) -> list[str]:
    if layer is None:
        return [name]
    return [place.format(layer) + leaf for place in _PLACES for leaf in _LEAVES.get(name, (name,))]


def checkpoint_quantization(config: ConfigReader) -> Quantization | None:
    """What the checkpoint's own config says; None for a 16-bit one.

    Raises:
        InputError: a method whose width cannot be read from the config; names the key.
    """
    part = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(part, Mapping) or not part:
        return None
    method = str(part.get("quant_method") or _modelopt(part) or "").lower().replace("_", "-")
    kept = _kept(part)
    if method == "compressed-tensors" or "config_groups" in part:
        return _compressed(config, part, kept)
    name = method.replace("-", "_")
    if name == "modelopt" and "FP4" in str(part.get("quant_algo", "")).upper():
        name = "modelopt_fp4"
    kv = 1.0 if "FP8" in str(part.get("kv_cache_quant_algo", "")).upper() else None
    if name in _FIXED:
        block = part.get("weight_block_size")
        return Quantization(
            method=method,
            bytes_each=_FIXED[name],
            kept=kept,
            only_experts=name in _ONLY_EXPERTS,
            aligned=int(block[0]) if isinstance(block, Sequence) and block else 1,
            kv_bytes=kv,
            expert_padding=256 if name in ("mxfp4", "gpt_oss_mxfp4") else 1,
        )
    if name == "bitsandbytes":
        return Quantization(method=method, bytes_each=1.0 if part.get("load_in_8bit") else 0.5 + 4 / 64, kept=kept)
    return _grouped(config, part, method, kept)


def _modelopt(part: Mapping[str, Any]) -> str | None:
    producer = part.get("producer")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return "modelopt" if named or "quant_algo" in part else None


def _kept(part: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules"):
        if isinstance(part.get(key), Sequence) and not isinstance(part[key], str):
            return tuple(str(rule) for rule in part[key])
    return ()


def _compressed(config: ConfigReader, part: Mapping[str, Any], kept: tuple[str, ...]) -> Quantization:
    groups = part.get("config_groups")
    schemes = [g.get("weights") for g in groups.values()] if isinstance(groups, Mapping) else []
    widths = [s for s in schemes if isinstance(s, Mapping) and isinstance(s.get("num_bits"), int)]
    if not widths:
        raise InputError(f"the config of {config.name} lacks quantization_config.config_groups.*.weights.num_bits")
    scheme = widths[0]
    group = int(scheme.get("group_size") or 0) if scheme.get("strategy") != "block" else 0
    block = scheme.get("block_structure")
    scale = 1 if scheme.get("type") == "float" and group == 16 else 2
    aligned = group or (int(block[0]) if isinstance(block, Sequence) and not isinstance(block, str) else 1)
    kv = part.get("kv_cache_scheme")
    return Quantization(
        method="compressed-tensors",
        bytes_each=int(scheme["num_bits"]) / 8 + (scale / group if group > 0 else 0.0),
        kept=kept,
        aligned=max(1, aligned),
        kv_bytes=int(kv.get("num_bits", 8)) / 8 if isinstance(kv, Mapping) else None,
    )


def _grouped(config: ConfigReader, part: Mapping[str, Any], method: str, kept: tuple[str, ...]) -> Quantization:
    """GPTQ, AWQ and their kin: a width and a group that shares a 16-bit scale and a packed zero point."""
    nested = part.get("weight_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else part
    bits = next((inner[k] for k in ("bits", "w_bit", "nbits", "num_bits") if isinstance(inner.get(k), int)), None)
    if bits is None:
        raise InputError(
            f"the config of {config.name}: quantization_config.quant_method {method!r} without a width in bits",
            hint="known are fp8, compressed-tensors, awq, gptq, mxfp4, modelopt, bitsandbytes and others with 'bits'",
        )
    group = next((int(inner[k]) for k in ("group_size", "q_group_size") if isinstance(inner.get(k), int)), 128)
    scales = (2 + bits / 8) / group if group > 0 else 0.0
    return Quantization(method=method, bytes_each=bits / 8 + scales, kept=kept, aligned=max(1, group))


def online_quantization(method: str) -> Quantization:
    """What ``--quantization METHOD`` makes of a 16-bit checkpoint: embedding and output layer stay 16 bit.

    Raises:
        InputError: a method that needs a checkpoint made for it.
    """
    name = method.lower().replace("-", "_")
    if name not in _ONLINE:
        raise InputError(
            f"quantization={method} needs a checkpoint that was quantized so",
            hint="a 16-bit checkpoint can be loaded with " + ", ".join(sorted(_ONLINE)),
        )
    return Quantization(method=name, bytes_each=_ONLINE[name], only_experts=name in _ONLY_EXPERTS)
