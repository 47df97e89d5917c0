"""The texts that say why a server ended: kind of failure, and what to do about it.

Texts are those of vLLM 0.4 to 0.33 and of PyTorch, NCCL, transformers, huggingface_hub and argparse below it.
One rule a row, in no order: which of several matches counts is decided by ``diagnosis``.
"""

from __future__ import annotations

import math
import re

from autotune.engines.failurerule import Rule, rule


def _gpu_busy(match: re.Match[str]) -> str:
    free, total, share = float(match["free"]), float(match["total"]), match["share"]
    below = math.floor(free / total * 100) / 100 if total else 0.0
    return (
        f"{match['free']} of {match['total']} GiB are free, gpu_memory_utilization {share} wants {match['want']}: "
        f"end what else holds the memory (a server that was not stopped?), or lower gpu_memory_utilization to "
        f"at most {below:.2f}"
    )


_HOST_MEMORY = "the host ran out of memory (not the GPU): free host memory or load fewer processes at once"
_LICENCE = "accept the licence on the model's page, then set HF_TOKEN (or log in with `hf auth login`)"
_LESS_MEMORY = (
    "lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens, or use more tensor parallelism; "
    "see that nothing else uses the GPU"
)
_NOT_THE_SETTINGS = "communication between GPUs failed; the settings are not to blame and tensor parallelism 1 may work"

RULES: tuple[Rule, ...] = (
    # The KV cache
    rule(
        "kv_too_small",
        r"To serve at least one request with the models?(?:'s)? max seq len \((?P<asked>\d+)\)"
        r".*estimated maximum model length is (?P<fits>\d+)",
        "lower max_model_len from {asked} to at most {fits}, or raise gpu_memory_utilization, or use more "
        "tensor parallelism",
    ),
    rule(
        "kv_too_small",
        r"estimated maximum model length is (?P<fits>\d+)",
        "lower max_model_len to at most {fits}, or raise gpu_memory_utilization",
    ),
    rule(
        "kv_too_small",
        r"To serve at least one request with the models?(?:'s)? max seq len \((?P<asked>\d+)\)",
        "the KV cache cannot hold one request of {asked} tokens: lower max_model_len, raise gpu_memory_utilization "
        "or use more tensor parallelism",
    ),
    rule(
        "kv_too_small",
        r"max seq len \((?P<asked>\d+)\) is larger than the maximum number of tokens that can be stored in "
        r"KV cache \((?P<fits>\d+)\)",
        "lower max_model_len from {asked} to at most {fits}, or raise gpu_memory_utilization",
    ),
    rule(
        "kv_too_small",
        r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<fits>\d+)\)",
        "lower max_num_seqs from {asked} to at most {fits}, or raise gpu_memory_utilization",
    ),
    rule(
        "no_kv_memory",
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough",
        "weights and activations fill the memory that gpu_memory_utilization allows: raise it, use more tensor "
        "parallelism, or lower max_num_batched_tokens",
    ),
    rule(
        "no_kv_memory",
        r"Available memory on node \d+ \((?P<free>[\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than "
        r"requested memory for kv",
        "{free} GiB are left for the KV cache on this CPU node: lower VLLM_CPU_KVCACHE_SPACE or kv_cache_memory_bytes",
    ),
    # Memory held by others
    rule(
        "gpu_busy",
        r"(?:Free|Available) memory on (?:device|node)[^(]*\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is "
        r"less than (?:desired \w+ memory utilization|the engine's budget[^(]*) ?\((?P<share>[\d.]+), "
        r"(?P<want>[\d.]+) GiB\)",
        _gpu_busy,
    ),
    rule(
        "gpu_busy",
        r"is less than desired \w+ memory utilization|Error in memory profiling\.|"
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy",
        "another process holds or frees memory on this GPU (a server that is still stopping?): wait until it is "
        "gone, then start again",
    ),
    # Out of memory
    rule(
        "oom",
        r"(?:\[[ \d.]+\] )?(?:(?:kernel|slurmstepd|[\w@-]+\.service)[^:]*: .*)?"
        r"(?:(?:Out of memory|Memory cgroup out of memory): Killed process|Detected \d+ oom[-_]kill|\boom-kill\b|"
        r"OOM[ -]?[Kk]illed|OOM killer)|DefaultCPUAllocator: (?:can't|not enough)|\[Errno 12\]|std::bad_alloc|"
        r"(?<!\w)MemoryError(?::|$)",
        _HOST_MEMORY,
        bare=True,
        in_flight=True,
    ),
    rule(
        "oom",
        r"Tried to allocate (?P<want>[\d.]+ \w+)\. (?:GPU|NPU|XPU)\s?\d+ has a total capacity of (?P<total>[\d.]+ \w+) "
        r"of which (?P<free>[\d.]+ \w+) is free",
        "{want} wanted, {free} of {total} free: " + _LESS_MEMORY,
        in_flight=True,
    ),
    rule(
        "oom",
        r"OutOfMemoryError|(?:CUDA|HIP|XPU|NPU|GPU|device) out of memory|CUDA error: out of memory|"
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|Cuda failure (?:2 )?'out of memory'|"
        r"not enough GPU memory|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED|OUT_OF_(?:DEVICE|HOST)_MEMORY|"
        r"Ran out of memory in memory space",
        _LESS_MEMORY,
        in_flight=True,
    ),
    # Sockets and flags
    rule(
        "port_in_use",
        r"\[Errno (?:98|48|10048)\]|[Aa]ddress already in use|EADDRINUSE",
        "another process listens on this port (or the last server is still ending): wait for it or choose another",
    ),
    rule(
        "port_in_use",
        r"docker: Error response from daemon: .*(?:port is already allocated|address already in use)",
        "another container publishes this port: stop it or choose another port",
        bare=True,
    ),
    rule(
        "bad_flag",
        r"(?:vllm(?: \w[\w-]*)*|(?:openai/)?api_server\.py|vllm\.entrypoints\S*): error: ",
        "the command line is refused: compare the flag with `vllm serve --help` of this vLLM version",
        bare=True,
    ),
    rule(
        "bad_flag",
        r"max_num_batched_tokens \((?P<batch>\d+)\) (?:is smaller than max_model_len|must be greater than or equal to "
        r"max_num_seqs) \((?P<need>\d+)\)",
        "raise max_num_batched_tokens from {batch} to at least {need}",
    ),
    rule(
        "bad_flag",
        r"Please pass the argument `trust_remote_code=True`|custom code which must be executed|"
        r"execute the configuration file in that repo",
        "the model brings its own code: add --trust-remote-code if you trust it",
    ),
    # Parallelism
    rule(
        "tp_not_divisible",
        r"(?:attention|query|kv|key/value) heads \((?P<heads>\d+)\) must be divisible by (?:the )?tensor[ _]parallel"
        r"(?:ism)?(?:[ _]size)? \((?P<tp>\d+)\)",
        "tensor_parallel_size must divide {heads}, and {tp} does not",
    ),
    rule(
        "tp_not_divisible",
        r"must be divisible by (?:the )?(?:tensor[ _]parallel|tp_size|world_size)|\d+ is not divisible by \d+|"
        r"not divisible by (?:weight quantization block|min_thread)|caused by too large tensor parallel size",
        "a dimension of this model does not divide by tensor_parallel_size: use a smaller one",
    ),
    rule(
        "not_enough_gpus",
        r"World size \((?P<want>\d+)\) is larger than the number of available GPUs \((?P<have>\d+)\)",
        "{want} GPUs wanted, {have} there: lower tensor_parallel_size or pipeline_parallel_size",
    ),
    rule(
        "not_enough_gpus",
        r"tensor_parallel_size \((?P<want>\d+)\) to less than max local gpu count \((?P<have>\d+)\)|"
        r"DP adjusted local rank (?P<rank>\d+) is out of bounds for (?P<devices>\d+) devices|"
        r"Unable to load Ray|Ray is (?:not installed|required for multi-node)|Cannot provide a placement group|"
        r"placement group (?:requiring|request)|number of required \w+s exceeds the total number of available|"
        r"(?:ensor parallel size|ensor_parallel_size).{0,40}cannot be larger than the number of available|"
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device is detected|"
        r"Found no NVIDIA driver|Failed to infer device type",
        "fewer GPUs are visible than tensor x pipeline x data parallelism needs: lower these, or check "
        "CUDA_VISIBLE_DEVICES and the driver",
    ),
    rule(
        "not_enough_gpus",
        r"docker: Error response from daemon: could not select device driver",
        "docker cannot hand out GPUs: install the NVIDIA container toolkit, or check --gpus",
        bare=True,
    ),
    rule(
        "max_model_len_too_long",
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \([^=)]*=(?P<fits>\d+)",
        "lower max_model_len from {asked} to at most {fits}, which the model's config allows",
    ),
    rule(
        "max_model_len_too_long",
        r"is greater than the derived max_model_len",
        "lower max_model_len to what the model's config allows",
    ),
    # The model
    rule(
        "gated_model",
        r"Cannot access gated repo|You are trying to access a gated repo",
        _LICENCE,
        bare=True,
    ),
    rule(
        "gated_model",
        r"GatedRepoError|Access to model \S+ is restricted|"
        r"not in the authorized list|awaiting a review from the repo authors",
        _LICENCE,
    ),
    rule(
        "gated_model",
        r"40[13] Client Error|(?:401|403) (?:Unauthorized|Forbidden)|Invalid user token|Invalid credentials in Auth",
        _LICENCE,
        rank=1,
    ),
    rule(
        "model_not_found",
        r"RepositoryNotFoundError|Repository Not Found for url|RevisionNotFoundError|(?<!Local)EntryNotFoundError|"
        r"is not a valid model identifier|is not a local folder|Invalid repository ID or local directory|"
        r"HFValidationError|Repo id must|does not appear to have (?:a file named|files? named)|"
        r"Cannot find any model weights|No (?:model )?config file found|"
        r"The (?:model|checkpoint) path .* does not exist|"
        r"\[Errno 2\] No such file or directory: '[^']*(?:config\.json|\.safetensors|\.gguf)'",
        "check the spelling of the model, its revision, and that a local folder holds config.json and weights; a "
        "private model needs HF_TOKEN",
    ),
    rule(
        "model_not_found",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to '?(?:https?://)?\S*huggingface|"
        r"Can't load (?:the )?(?:configuration|config|tokenizer|processor|image)|huggingface\.co.*(?:name resolution|"
        r"Max retries exceeded|timed out)|404 Client Error",
        "the model is not in the local cache and the hub was not reached: download it first (`hf download MODEL`) or "
        "give a folder",
        rank=1,
    ),
    # Devices and communication
    rule(
        "nccl",
        r"/dev/shm.*No space left on device|No space left on device.*/dev/shm",
        "shared memory is too small: give the container more (docker --shm-size 16g or --ipc host)",
    ),
    rule(
        "nccl",
        r"\b[NHR]CCL error|nccl(?:UnhandledCuda|System|Internal|Remote|InvalidUsage|Invalid)\w*|DistBackendError|"
        r"DistNetworkError|DistStoreError|hccl\w* (?:error|failed)|Gloo connect\w* failed|"
        r"collective operation timeout|NCCL (?:watchdog|operations have failed)",
        _NOT_THE_SETTINGS,
        rank=1,
        in_flight=True,
    ),
    rule(
        "disk_full",
        r"Disk quota exceeded|No space left on device",
        "the disk is full or over its quota: every setting will fail; free space or point VLLM_CACHE_ROOT, HF_HOME and "
        "TMPDIR elsewhere",
    ),
    rule(
        "unsupported",
        r"only supported on GPUs with compute capability of at least (?P<need>[\d.]+)\. Your (?P<gpu>.*?) GPU has "
        r"compute capability (?P<have>[\d.]+)",
        "{gpu} (compute capability {have}) cannot do this, {need} is needed: choose another dtype, such as half",
    ),
    rule(
        "unsupported",
        r"is only supported on GPUs with compute capability|Unknown quantization method|"
        r"quantization method \S+ is not supported|quantization is currently not supported|Minimum capability: \d+|"
        r"Quantization method specified in the model config|No valid (?:\S+ )*attention backend|"
        r"Model architectures? \[.*\] (?:are not supported|failed to be inspected|is not supported)|"
        r"Transformers does not recognize this architecture|out of resource: shared memory|"
        r"no kernel image is available|is incompatible with|"
        r"Number of experts in the model must be greater than 0|Non-MoE models do not support|"
        r"Decode context parallelism for|does not support (?:\w+ ){0,3}(?:parallelism|quantization|dtype|backend)|"
        r"is not supported (?:on|for|by|with|in) (?:this|the current|current|V1|ROCm|XPU|CPU|TPU|cuda)|"
        r"not supported by the \w+ engine",
        "this vLLM, GPU or model cannot do what the flags ask for: leave the flag that the line names at its default",
        rank=1,
    ),
    rule(
        "bad_flag",
        r"(?:ValidationError: )?\d+ validation errors? for (?P<what>\w+)|(?:Value error|Assertion failed), ",
        "vLLM refuses this combination of flags: the line says which rule is broken",
        rank=2,
        bare=True,
    ),
)


def match_rule(text: str, *, bare: bool) -> tuple[Rule, re.Match[str]] | None:
    """The matching rule of the lowest rank, and of these the first; ``bare``: only at the start of the text."""
    best: tuple[Rule, re.Match[str]] | None = None
    for row in RULES:
        if (bare and not row.bare) or (best is not None and row.rank >= best[0].rank):
            continue
        match = row.pattern.match(text) if bare else row.pattern.search(text)
        if match is not None:
            best = (row, match)
            if row.rank == 0:
                break
    return best
