"""What is known of single flags of ``vllm serve``, from vLLM 0.11 to 0.33: short names, arity, type, who sets them."""

from __future__ import annotations

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-ep": "enable_expert_parallel",
    "-asc": "api_server_count",
    "-q": "quantization",
    "-n": "nnodes",
    "-r": "node_rank",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
}
ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}
SWITCHES = frozenset({
    "aggregate_engine_logging", "allow_credentials", "allow_deprecated_quantization", "async_scheduling",
    "calculate_kv_scales", "cudagraph_metrics", "data_parallel_external_lb", "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "enforce_eager", "fully_sharded_loras", "headless", "interleave_mm_strings", "kv_cache_metrics",
    "kv_sharing_fast_prefill", "language_model_only", "log_error_stack",
    "long_prefill_token_threshold_adaptive", "mm_encoder_only", "multi_step_stream_outputs", "numa_bind",
    "ray_workers_use_nsight", "return_tokens_as_token_ids", "scheduler_reserve_full_isl",
    "skip_mm_profiling", "skip_tokenizer_init", "specialize_active_lora", "tokens_only",
    "trust_remote_code", "trust_request_chat_template", "use_tqdm_on_load", "use_v2_block_manager",
})  # fmt: skip
"""Flags without a value, besides all ``enable_*`` and ``disable_*``: a word after them is not theirs."""
LISTS = frozenset({
    "allowed_media_domains", "cpu_offload_params", "cuda_graph_sizes", "cudagraph_capture_sizes",
    "kv_cache_dtype_skip_layers", "logits_processors", "lora_modules", "lora_target_modules",
    "numa_bind_cpus", "numa_bind_nodes", "offload_params",
})  # fmt: skip
"""Flags that take several words; one word is a list of one."""
JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
TEXT = frozenset({
    "chat_template", "code_revision", "dtype", "load_format", "model", "quantization", "revision",
    "tokenizer", "tokenizer_revision",
})  # fmt: skip
"""Flags whose value is text even where it reads as a number."""
SIZES = frozenset({
    "kv_cache_memory_bytes", "max_model_len", "max_num_batched_tokens", "max_num_queued_tokens",
    "max_num_scheduled_tokens",
})  # fmt: skip
"""Whole numbers that vLLM also reads as 32k (32,000) and 32K (32,768)."""

CHOSEN_PER_SERVER = frozenset({"host", "port", "served_model_name", "api_key"})
"""In a pasted line these only say where that server listened: they are left out."""
OWNED = {
    "host": "the server listens on the loopback only",
    "port": "a free port is chosen for each server",
    "served_model_name": "each server gets a name of its own, so that the one that answers is known to be ours",
    "api_key": "give it as VLLM_API_KEY in the environment: a command line can be read by everyone on the host",
    "hf_token": "give it as HF_TOKEN in the environment: a command line can be read by everyone on the host",
    "model": "it is given by --model",
    "config": "write its flags out: a file may change between trials",
    "uds": "the server is reached over the loopback",
    "grpc": "the server is reached over HTTP",
    "headless": "a server without HTTP cannot be measured",
    "root_path": "the server is reached at its own root",
    "ssl_keyfile": "the server is reached over plain HTTP on the loopback",
    "ssl_certfile": "the server is reached over plain HTTP on the loopback",
    "disable_log_stats": "it removes the counters that throughput is read from",
}
