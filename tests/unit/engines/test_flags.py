"""Settings to a command line and back; lines as users paste them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines import flagtable
from autotune.engines.flags import check_owned, parse_argv, parse_assignment, parse_line, render
from autotune.errors import InputError
from autotune.records.settings import Settings


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_num_seqs": 256, "enforce_eager": True}, "--enforce-eager --max-num-seqs 256"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"gpu_memory_utilization": 0.95}, "--gpu-memory-utilization 0.95"),
        ({"cudagraph_capture_sizes": [1, 2, 4]}, "--cudagraph-capture-sizes 1 2 4"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
         """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""),
        ({"compilation_config.cudagraph_mode": "FULL"}, "--compilation-config.cudagraph_mode FULL"),
        ({"compilation_config.use_x": True, "compilation_config.sizes": [1, 2]},
         "--compilation-config.sizes '[1, 2]' --compilation-config.use_x true"),
        ({"allowed_origins": ["*"]}, """--allowed-origins '["*"]'"""),
        ({"optimization_level": 3}, "-O3"),
        ({"max_model_len": -1}, "--max-model-len=-1"),
        ({"chat_template": ""}, "--chat-template="),
        ({"lora_modules": [{"name": "a"}]}, """--lora-modules '{"name": "a"}'"""),
        ({}, ""),
    ],
)  # fmt: skip
def test_render_and_back(values: dict[str, Any], line: str) -> None:
    words = render(Settings(values))
    assert words == shlex.split(line)
    assert parse_argv(words) == Settings(values)


def test_the_order_of_settings_does_not_matter() -> None:
    one, two = Settings(b=1, a=2), Settings(a=2, b=1)
    assert render(one) == render(two) == ["--a", "2", "--b", "1"]


NAMES = st.sampled_from(
    ["max_num_seqs", "block_size", "distributed_executor_backend", "kv_cache_dtype", "some_new_flag", "cc.level"]
)
WORDS = st.from_regex(r"[a-zA-Z_/.][a-zA-Z0-9_/.: -]{0,12}", fullmatch=True).filter(
    lambda text: (
        text.strip().lower() not in ("true", "false", "null", "nan", "infinity", "inf") and not text.startswith(".")
    )
)
PLAIN = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
JSON_OBJECTS = st.dictionaries(WORDS, st.booleans() | st.none() | PLAIN | st.lists(PLAIN, max_size=3), max_size=3)
FLAGS = st.one_of(
    st.tuples(NAMES, PLAIN),
    st.tuples(st.sampled_from(sorted(flagtable.SWITCHES)) | st.just("enable_something"), st.booleans()),
    st.tuples(st.sampled_from(sorted(flagtable.LISTS)), st.lists(st.integers(0, 999) | WORDS, min_size=1, max_size=5)),
    st.tuples(st.sampled_from(sorted(flagtable.JSON_LISTS)), st.lists(PLAIN, max_size=3)),
    st.tuples(st.sampled_from(sorted(flagtable.SIZES)), st.integers(-1, 10**12)),
    st.tuples(st.sampled_from(sorted(flagtable.TEXT)), WORDS | st.from_regex(r"[0-9]{1,8}(e[0-9]+)?", fullmatch=True)),
    st.tuples(st.sampled_from(["speculative_config", "hf_overrides"]), JSON_OBJECTS),
    st.tuples(st.just("optimization_level"), st.integers(0, 3)),
    st.tuples(st.just("new_list_of_numbers"), st.lists(st.integers(), min_size=2, max_size=4)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(FLAGS, max_size=8))
def test_parse_is_the_inverse_of_render(flags: list[tuple[str, Any]]) -> None:
    wanted = Settings(dict(flags))
    words = render(wanted)
    assert parse_argv(words) == wanted
    assert parse_argv(shlex.split(shlex.join(words))) == wanted


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve Qwen/Qwen3-32B -tp 8", {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 8}),
        ("vllm serve --max-num-seqs 64 Qwen/Q", {"model": "Qwen/Q", "max_num_seqs": 64}),
        ("vllm serve --enforce-eager Qwen/Q -dp=2 -pp 2", {"model": "Qwen/Q", "enforce_eager": True,
         "data_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("vllm serve --no-enable-prefix-caching Qwen/Q", {"model": "Qwen/Q", "enable_prefix_caching": False}),
        ("vllm serve --model Qwen/Q --max_model_len 32k", {"model": "Qwen/Q", "max_model_len": 32000}),
        ("vllm serve Qwen/Q --max-model-len=32K", {"model": "Qwen/Q", "max_model_len": 32768}),
        ("vllm serve Q --max-model-len auto --max-num-batched-tokens 1.5k", {"model": "Q", "max_model_len": -1,
         "max_num_batched_tokens": 1500}),
        ("vllm serve Q --kv-cache-memory-bytes 2G", {"model": "Q", "kv_cache_memory_bytes": 2 << 30}),
        ("vllm serve Q -O3 -ep -q fp8", {"model": "Q", "optimization_level": 3, "enable_expert_parallel": True,
         "quantization": "fp8"}),
        ("vllm serve Q -O 1", {"model": "Q", "optimization_level": 1}),
        ("vllm serve Q -cc.cudagraph_mode=NONE", {"model": "Q", "compilation_config.cudagraph_mode": "NONE"}),
        ("vllm serve Q -cc '{\"mode\": 3}'", {"model": "Q", "compilation_config": {"mode": 3}}),
        ("vllm serve --cudagraph-capture-sizes 4 --model Q", {"model": "Q", "cudagraph_capture_sizes": [4]}),
        ("vllm serve Q --new-list a b", {"model": "Q", "new_list": ["a", "b"]}),
        ("vllm serve Q --device-memory-utilization .9", {"model": "Q", "gpu_memory_utilization": 0.9}),
        ("vllm serve Q --revision 12345678e9", {"model": "Q", "revision": "12345678e9"}),
        ("vllm serve Q --odd 1e999", {"model": "Q", "odd": "1e999"}),
        ("vllm serve Q --disable-access-log-for-endpoints /health", {"model": "Q",
         "disable_access_log_for_endpoints": "/health"}),
        ("/opt/v/bin/vllm serve Q", {"model": "Q"}),
        ("python3 -m vllm.entrypoints.openai.api_server --model Q --tensor-parallel-size 2",
         {"model": "Q", "tensor_parallel_size": 2}),
        ("Q --max-num-seqs 8", {"model": "Q", "max_num_seqs": 8}),
        ("vllm serve Q \\\n  --block-size 8 \\\r\n -tp 2", {"model": "Q", "block_size": 8, "tensor_parallel_size": 2}),
        ("", {}),
    ],
)  # fmt: skip
def test_pasted_lines(line: str, expected: dict[str, Any]) -> None:
    assert parse_line(line).settings == Settings(expected)


def test_what_belongs_to_a_server_is_left_out_by_name_only() -> None:
    line = parse_line(
        "VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 vllm serve Q --host 0.0.0.0 --port 8000"
        " --served-model-name a b --api-key sk-secret"
    )
    assert line.settings == Settings(model="Q")
    assert set(line.left_out) == {"VLLM_USE_V1", "CUDA_VISIBLE_DEVICES", "host", "port", "served_model_name", "api_key"}
    assert "secret" not in repr(line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("vllm serve Q --disable-log-stats", "disable_log_stats is not a setting"),
        ("vllm serve Q --config f.yaml", "config is not a setting"),
        ("vllm serve Q --hf-token hf_x", "HF_TOKEN"),
        ("vllm serve Q R", "'R' is neither a flag nor the value of one"),
        ("vllm serve 'Q", "cannot be read"),
        ("vllm serve Q -xy 3", "unknown short flag '-xy'"),
        ("vllm serve Q --max-model-len 32x", "max_model_len must be a whole number, got '32x'"),
        ("vllm serve Q --max-model-len 1.5K", "max_model_len must be a whole number"),
        ("vllm serve Q --speculative-config '{method: ngram}'", "speculative_config is not JSON"),
        ("vllm serve Q --Max-Seqs 3", "lower case"),
        ("vllm serve Q --hf-overrides '{\"a\": 1e999}'", "hf_overrides"),
    ],
)
def test_lines_that_cannot_be_used(line: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_line(line)
    assert says in str(caught.value)
    assert caught.value.hint
    assert "hf_x" not in str(caught.value)


def test_an_empty_list_cannot_be_said() -> None:
    with pytest.raises(InputError, match="empty list"):
        render(Settings(cudagraph_capture_sizes=[]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seqs=256", ("max_num_seqs", 256)),
        ("--max-num-seqs=256", ("max_num_seqs", 256)),
        ("enforce_eager=true", ("enforce_eager", True)),
        ("enable_prefix_caching=False", ("enable_prefix_caching", False)),
        ("max_model_len=32K", ("max_model_len", 32768)),
        ("kv_cache_dtype=fp8", ("kv_cache_dtype", "fp8")),
        ('speculative_config={"method": "ngram"}', ("speculative_config", {"method": "ngram"})),
        ("compilation_config.mode=3", ("compilation_config.mode", 3)),
        ("gpu_memory_utilization=0.9", ("gpu_memory_utilization", 0.9)),
    ],
)
def test_assignments(text: str, expected: tuple[str, Any]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["max_num_seqs", "=3", "Max=3", "port=8000", "model=Q", "api_key=x"])
def test_assignments_that_cannot_be_used(text: str) -> None:
    with pytest.raises(InputError):
        parse_assignment(text)


@pytest.mark.parametrize("name", sorted(flagtable.OWNED))
def test_what_autotune_chooses_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is not a setting of a study: .+"):
        check_owned(Settings({name: "x"}))


def test_a_switch_that_is_off_is_no_owned_flag() -> None:
    check_owned(Settings(disable_log_stats=False, max_num_seqs=3))
