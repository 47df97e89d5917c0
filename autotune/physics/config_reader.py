"""The keys of a Hugging Face ``config.json`` under their many names, with the defaults that the file leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import InputError

# Where multimodal configs keep the language model (the order in which transformers' get_text_config looks).
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
# Parts of one config that DBRX and MPT keep in folders of their own.
_PARTS = ("attn_config", "ffn_config")
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": (
        "num_key_value_heads",
        "n_head_kv",
        "num_kv_heads",
        "kv_n_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "hidden_size_per_head", "kv_channels", "attention_head_dim"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    # The names and the rule (the smallest counts) are vLLM's: transformers_utils/model_arch_config_convertor.py.
    "max_length": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_target_positions",
        "max_sequence_length",
        "max_seq_length",
        "seq_len",
    ),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "moe_top_k",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_intermediate": (
        "shared_expert_intermediate_size",
        "share_expert_dim",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
}
# Values that real config.json files of these types leave to the class defaults of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_bigcode": {"multi_query": True},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    "llama": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "llama4_text": {"interleave_moe_layer_step": 1, "attention_chunk_size": 8192},
    "mistral": {"vocab_size": 32000, "head_dim": None, "max_position_embeddings": 131072},
    "phi3": {"vocab_size": 32064},
    "qwen2_moe": {"shared_expert_intermediate_size": 5632},
}
# Layer structures that the arithmetic of this room does not describe: a wrong card would be worse than none.
_NOT_MODELLED = ("longcat_flash", "zamba", "deepseek_v4", "rwkv", "mamba", "falcon_mamba", "recurrent_gemma", "t5")
_NOT_MODELLED_KEYS = ("block_configs", "compress_ratios")
# Types whose classes tie the output layer to the embedding unless the file says otherwise.
_TIED = ("gemma", "cohere", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "starcoder2", "codegen", "lfm2")


class ConfigReader:
    """One model's config: the language model's keys first, then those of the file around it."""

    def __init__(self, config: Mapping[str, Any], name: str = "") -> None:
        self.name = name or str(config.get("_name_or_path") or "the model")
        self.root = config
        self.text = _text_part(config)
        self.model_type = str(self.text.get("model_type") or config.get("model_type") or "")
        self._defaults = _DEFAULTS.get(self.model_type, {})
        strange = [key for key in _NOT_MODELLED_KEYS if self.text.get(key)]
        if strange or self.model_type.startswith(_NOT_MODELLED):
            what = strange[0] if strange else f"model_type {self.model_type}"
            raise InputError(
                f"{self.name}: layers of this kind ({what}) cannot be predicted",
                hint="such a model can be measured on a real server, not predicted",
            )

    def layer(self, index: int) -> ConfigReader:
        """The config as layer number ``index`` sees it (``per_layer_config``, heads by layer)."""
        listed = self.text.get("per_layer_config")
        own = dict(listed.get(f"{index:02d}") or listed.get(str(index)) or {}) if isinstance(listed, Mapping) else {}
        heads = self.list_("num_attention_heads_per_layer")
        if index < len(heads):
            own["num_attention_heads"] = heads[index]
        return self if not own else ConfigReader({**self.text, **own}, self.name)

    def get(self, key: str, default: Any = None) -> Any:
        """The first value found under ``key`` or one of its other names; ``null`` counts as absent."""
        names = _NAMES.get(key, (key,))
        for source in (self.text, self._defaults, self.root):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def every(self, key: str) -> list[Any]:
        """All values under ``key`` and its other names in the language model's part."""
        found = [self.text[name] for name in _NAMES[key] if self.text.get(name) is not None]
        return found or [value for name in _NAMES[key] if (value := self._defaults.get(name)) is not None]

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1 (or ``default``).

        Raises:
            InputError: absent without a default, or no such number; names the key as the file spells it.
        """
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            value = max(value)  # per-layer lists: the largest where one number is asked for
        spelled = _NAMES.get(key, (key,))[0]
        if value is None:
            if default is not None:
                return default
            raise InputError(
                f"the config of {self.name} lacks {spelled}",
                hint="give the config.json of a decoder language model, as the hub or save_pretrained wrote it",
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value or value < 0:
            raise InputError(f"the config of {self.name}: {spelled} must be a whole number, got {value!r}")
        return int(value)

    def list_(self, key: str) -> list[Any]:
        """A list, empty when absent."""
        value = self.get(key)
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []

    def is_type(self, *prefixes: str) -> bool:
        """Whether the model type begins with one of ``prefixes``."""
        return self.model_type.startswith(prefixes)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weights."""
        for source in (self.text, self.root):
            if isinstance(source.get("tie_word_embeddings"), bool):
                return bool(source["tie_word_embeddings"])
        return self.model_type.startswith(_TIED)

    @property
    def max_model_len(self) -> int:
        """Longest context that vLLM accepts without an override, tokens (its ``_get_and_verify_max_len``).

        The smallest of the length keys; a ``yarn`` scaling counts from its original length times its factor;
        ``llama3``, ``longrope`` and Gemma-3's scaling are already in the number.
        """
        lengths = [int(value) for value in self.every("max_length") if isinstance(value, (int, float))]
        longest = float(min(lengths)) if lengths else 2048.0
        if isinstance(self.text.get("model_max_length"), int):
            longest = float(self.text["model_max_length"])
        factor = 1.0
        for rope in self._ropes():
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind in ("su", "longrope", "llama3", "default", "mrope") or "gemma3" in self.model_type:
                continue
            factor = float(rope.get("factor") or factor)
            if kind == "yarn":
                longest = float(rope.get("original_max_position_embeddings") or longest / factor)
        return int(longest * factor)

    def _ropes(self) -> list[Mapping[str, Any]]:
        rope = self.get("rope_parameters") or self.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return []
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        return nested or [rope]


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config
    while nested := [text[name] for name in _NESTED if isinstance(text.get(name), Mapping) and text[name]]:
        text = nested[0]
    merged = dict(text)
    for part in _PARTS:
        if isinstance(text.get(part), Mapping):
            merged = {**text[part], **merged}
    return merged
