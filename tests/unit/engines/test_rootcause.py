"""Each text that names a cause: its kind, and the numbers of the line in the hint."""

from __future__ import annotations

import re

import pytest

from autotune.engines.rootcause import RULES, match_rule

# kind, line, words that the hint must hold
TEXTS = [
    (
        "kv_too_small",
        "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is "
        "needed, "
        "which is larger than the available KV cache memory (3.10 GiB). Based on the available memory, the estimated "
        "maximum model length is 22560. Try increasing `gpu_memory_utilization`",
        ("40960", "at most 22560"),
    ),
    ("kv_too_small", "ValueError: the estimated maximum model length is 100", ("at most 100",)),
    (
        "kv_too_small",
        "ValueError: To serve at least one request with the model's max seq len (9), (1 GiB",
        ("9 tokens",),
    ),
    (
        "kv_too_small",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored "
        "in KV "
        "cache (1600).",
        ("from 32768 to at most 1600",),
    ),
    (
        "kv_too_small",
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (600). Please lower",
        ("max_num_seqs from 1024 to at most 600",),
    ),
    ("no_kv_memory", "ValueError: No available memory for the cache blocks. Try increasing", ("raise it",)),
    (
        "no_kv_memory",
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve",
        ("raise it",),
    ),
    (
        "no_kv_memory",
        "ValueError: Available memory on node 0 (3.10/8.00 GiB) on kv cache allocation is less than requested "
        "memory for kv "
        "(4.0 GiB).",
        ("3.10 GiB", "VLLM_CPU_KVCACHE_SPACE"),
    ),
    (
        "gpu_busy",
        "ValueError: Free memory on device (13.58/15.99 GiB) on startup is less than desired GPU memory utilization "
        "(0.85, "
        "13.59 GiB).",
        ("13.58 of 15.99 GiB", "at most 0.84"),
    ),
    (
        "gpu_busy",
        "ValueError: Free memory on device cuda:0 (1.00/80.00 GiB) on startup is less than desired GPU memory "
        "utilization "
        "(0.92, 73.60 GiB).",
        ("at most 0.01",),
    ),
    (
        "gpu_busy",
        "ValueError: Available memory on node 0 (7.10/15.60 GiB) on startup is less than desired CPU memory "
        "utilization "
        "(0.92, 14.35 GiB).",
        ("at most 0.45",),
    ),
    ("gpu_busy", "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", ("another process",)),
    (
        "gpu_busy",
        "AssertionError: Error in memory profiling. This happens when the GPU memory was not properly",
        ("wait",),
    ),
    (
        "oom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 2 has a total capacity of "
        "95.00 GiB "
        "of which 510.31 MiB is free.",
        ("896.00 MiB wanted, 510.31 MiB of 95.00 GiB free",),
    ),
    ("oom", "torch.cuda.OutOfMemoryError: CUDA out of memory.", ("gpu_memory_utilization",)),
    ("oom", "InductorError: OutOfMemoryError: HIP out of memory. Tried to allocate 80.00 MiB", ("max_num_seqs",)),
    ("oom", "torch.AcceleratorError: CUDA error: out of memory", ("max_num_seqs",)),
    (
        "oom",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ("max_num_seqs",),
    ),
    (
        "oom",
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        ("max_num",),
    ),
    (
        "oom",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering "
        "`max_num_seqs` or `gpu_memory_utilization`",
        ("max_num_seqs",),
    ),
    ("oom", "OSError: [Errno 12] Cannot allocate memory", ("host",)),
    ("oom", "MemoryError", ("host",)),
    ("oom", "RuntimeError: ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'", ("max_num_seqs",)),
    ("port_in_use", "OSError: [Errno 98] Address already in use", ("port",)),
    ("port_in_use", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5555')", ("port",)),
    (
        "port_in_use",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: "
        "29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        ("port",),
    ),
    ("bad_flag", "vllm: error: unrecognized arguments: --no-such-flag 3", ("--help",)),
    ("bad_flag", "vllm serve: error: argument --port: invalid int value: 'x'", ("--help",)),
    ("bad_flag", "api_server.py: error: unrecognized arguments: --x", ("--help",)),
    (
        "bad_flag",
        "Value error, max_num_batched_tokens (2048) is smaller than max_model_len (4096). This effectively limits",
        ("from 2048 to at least 4096",),
    ),
    (
        "bad_flag",
        "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code",
        ("trust-remote-code",),
    ),
    ("bad_flag", "pydantic_core.ValidationError: 1 validation error for CacheConfig", ("flags",)),
    (
        "tp_not_divisible",
        "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (5).",
        ("divide 64", "5 does not"),
    ),
    (
        "tp_not_divisible",
        "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization "
        "block_n = 128.",
        ("tensor_parallel_size",),
    ),
    (
        "tp_not_divisible",
        "ValueError: The input size is not aligned with the quantized weight shape. This can be caused by too large "
        "tensor "
        "parallel size.",
        ("tensor_parallel_size",),
    ),
    (
        "not_enough_gpus",
        "Value error, World size (16) is larger than the number of available GPUs (8) in this node. If this is "
        "intentional",
        ("16 GPUs wanted, 8 there",),
    ),
    (
        "not_enough_gpus",
        "ValueError: Unable to load Ray: No module named 'ray'. Ray is required for multi-node inference",
        ("CUDA_VISIBLE_DEVICES",),
    ),
    (
        "not_enough_gpus",
        "AssertionError: please set tensor_parallel_size (4) to less than max local gpu count (2)",
        ("CUDA_VISIBLE_DEVICES",),
    ),
    ("not_enough_gpus", "RuntimeError: No CUDA GPUs are available", ("driver",)),
    ("not_enough_gpus", "RuntimeError: Failed to infer device type", ("driver",)),
    (
        "max_model_len_too_long",
        "Value error, User-specified max_model_len (999999) is greater than the derived max_model_len "
        "(max_position_embeddings=2048.0 or model_max_length=None in model's config.json).",
        ("from 999999 to at most 2048",),
    ),
    ("gated_model", "huggingface_hub.errors.GatedRepoError: 401 Client Error.", ("HF_TOKEN",)),
    ("gated_model", "OSError: You are trying to access a gated repo.", ("licence",)),
    (
        "gated_model",
        "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/x",
        ("HF_TOKEN",),
    ),
    ("model_not_found", "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.", ("spelling",)),
    (
        "model_not_found",
        "OSError: x is not a local folder and is not a valid model identifier listed on 'h'",
        ("spelling",),
    ),
    (
        "model_not_found",
        "ValueError: Invalid repository ID or local directory specified: '/models/nothing'",
        ("config.json",),
    ),
    ("model_not_found", "OSError: /m does not appear to have a file named config.json.", ("config.json",)),
    ("model_not_found", "OSError: We couldn't connect to 'https://huggingface.co' to load the files", ("download",)),
    (
        "model_not_found",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot",
        ("download",),
    ),
    ("nccl", "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", ("settings",)),
    ("nccl", "torch.distributed.DistBackendError: NCCL error in: x.cpp:1", ("settings",)),
    ("nccl", "RuntimeError: Gloo connectFullMesh failed with timeout", ("settings",)),
    (
        "nccl",
        "RuntimeError: NCCL error. Last error: Error while creating shared memory segment /dev/shm/nccl-x (size 9): "
        "No space "
        "left on device",
        ("shm-size",),
    ),
    ("disk_full", "OSError: [Errno 122] Disk quota exceeded: '/home/x'", ("VLLM_CACHE_ROOT",)),
    ("disk_full", "OSError: [Errno 28] No space left on device", ("VLLM_CACHE_ROOT",)),
    (
        "unsupported",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU "
        "has compute "
        "capability 7.5. You can use float16 instead",
        ("Tesla T4", "7.5", "8.0"),
    ),
    ("unsupported", "ValueError: Unknown quantization method: foo. Must be one of", ("default",)),
    ("unsupported", "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", ("default",)),
    (
        "unsupported",
        "ValueError: The checkpoint you are trying to load has model type `x` but Transformers does not "
        "recognize "
        "this architecture.",
        ("default",),
    ),
    ("unsupported", "RuntimeError: CUDA error: no kernel image is available for execution on the device", ("default",)),
    (
        "unsupported",
        "Value error, Number of experts in the model must be greater than 0 when expert parallelism is",
        ("def",),
    ),
]


@pytest.mark.parametrize(("kind", "text", "words"), TEXTS)
def test_texts(kind: str, text: str, words: tuple[str, ...]) -> None:
    found = match_rule(text, bare=False)
    assert found is not None
    rule, match = found
    assert rule.kind == kind
    hint = rule.advice(match)
    assert all(word in hint for word in words), hint
    assert "{" not in hint


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: This model's maximum context length is 2048 tokens.",
        "AttributeError: 'X' object has no attribute 'y'",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "asyncio.exceptions.CancelledError",
        "TypeError: forward() got an unexpected keyword argument",
    ],
)
def test_what_no_rule_knows(text: str) -> None:
    assert match_rule(text, bare=False) is None


def test_bare_text_counts_only_from_its_beginning() -> None:
    assert match_rule("the user asked: vllm: error: why?", bare=True) is None
    assert match_rule("CUDA out of memory is a frequent error", bare=True) is None
    found = match_rule("vllm: error: unrecognized arguments: --x", bare=True)
    assert found is not None
    assert found[0].kind == "bad_flag"


def test_an_exact_text_comes_before_a_weak_one() -> None:
    found = match_rule("RepositoryNotFoundError: 401 Client Error. Repository Not Found for url", bare=False)
    assert found is not None
    assert found[0].kind == "model_not_found"


def test_every_rule_matches_some_text_here_or_is_bare() -> None:
    texts = [text for _, text, _ in TEXTS]
    silent = [rule for rule in RULES if not any(rule.pattern.search(text) for text in texts) and not rule.bare]
    assert not silent


def test_no_pattern_backtracks_for_long() -> None:
    hard = ("max seq len (1) " * 400 + "x" * 2000, "vllm a" + "-a" * 4000, "[" + "1 " * 4000, "Your " * 3000)
    for rule in RULES:
        for text in hard:
            assert rule.pattern.search(text) is None or isinstance(rule.pattern.search(text), re.Match)
