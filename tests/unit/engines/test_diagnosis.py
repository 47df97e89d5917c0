"""Lives of servers in their logs, in the words of many versions: what ended them, if anything did."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines.diagnosis import CAUSES, Diagnosis, diagnose
from autotune.engines.logline import parse

API = "(APIServer pid=70) "
CORE = "(EngineCore_DP0 pid=80) "
UP = (
    f"{API}INFO 10-09 12:00:00 [api_server.py:1896] vLLM API server version 0.11.0",
    f"{API}INFO 10-09 12:00:00 [utils.py:233] non-default args: {{'model': 'm'}}",
    f"{CORE}INFO 10-09 12:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m'",
)
READY = (
    f"{API}INFO 10-09 12:01:00 [api_server.py:1900] Starting vLLM API server 0 on http://0.0.0.0:8000",
    f"{API}INFO:     Started server process [70]",
    f"{API}INFO:     Application startup complete.",
)
ASSERT = f"{CORE}ERROR 10-09 12:05:00 [core.py:710] "
DEATH = (
    f"{ASSERT}EngineCore encountered a fatal error.",
    f"{ASSERT}Traceback (most recent call last):",
    f'{ASSERT}  File "/x/core.py", line 700, in run_engine_core',
    f"{ASSERT}torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    f"{API}ERROR 10-09 12:05:00 [async_llm.py:480] AsyncLLM output_handler failed.",
    f"{API}ERROR 10-09 12:05:00 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered "
    "an issue. See stack trace (above) for the root cause.",
    f"{API}INFO:     Shutting down",
    f"{API}INFO:     Application shutdown complete.",
)
STOP = (
    f"{API}INFO 10-09 13:00:00 [launcher.py:99] Shutting down FastAPI HTTP server.",
    "[rank0]:[W1009 13:00:00.379017585 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not "
    "called before program exit, which can leak resources.",
    f"{API}INFO:     Shutting down",
    f"{API}INFO:     Waiting for application shutdown.",
    f"{API}INFO:     Application shutdown complete.",
)
GENERIC = f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"


def stats(stamp: str, rate: float = 100.0, proc: str = API) -> str:
    return (
        f"{proc}INFO {stamp} [loggers.py:123] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation "
        f"throughput: {rate} tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, "
        "Prefix cache hit rate: 0.0%"
    )


def kind(*lines: str) -> str | None:
    failure = diagnose(lines)
    return None if failure is None else failure.kind


# ---- nothing ended it ------------------------------------------------------------------------------------------

HEALTHY: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "starting": UP,
    "serving": (*UP, *READY, stats("10-09 12:02:00")),
    "stopped": (*UP, *READY, stats("10-09 12:02:00"), *STOP),
    "the log begins in the middle": (
        stats("10-09 12:02:00"),
        f'{API}INFO:     1.1.1.1:2 - "GET /health HTTP/1.1" 200 OK',
    ),
    "a request too long": (
        *UP,
        *READY,
        f"{API}ERROR 10-09 12:02:00 [serving_chat.py:203] Error in preprocessing prompt inputs",
        f"{API}ERROR 10-09 12:02:00 [serving_chat.py:203] ValueError: This model's maximum context length is 2048 "
        f"tokens.",
        f'{API}INFO:     1.1.1.1:2 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
    ),
    "a request too long, and nothing before it": (
        f"{API}ERROR 10-09 12:02:00 [serving_chat.py:203] ValueError: This model's maximum context length is 2048 "
        f"tokens.",
    ),
    "a wrong model name": (
        *UP,
        *READY,
        f"{API}ERROR 10-09 12:02:00 [serving_chat.py:136] Error with model object='error' message='The model `x` "
        f"does not "
        "exist.' type='NotFoundError' param=None code=404",
    ),
    "a user's text about failures": (
        *UP,
        *READY,
        f"{API}INFO 10-09 12:02:00 [logger.py:41] Received request chatcmpl-1: prompt: 'RuntimeError: CUDA out of "
        f"memory. "
        "Why? EngineDeadError', params: SamplingParams(n=1)",
        f"{API}INFO 10-09 12:02:09 [logger.py:63] Generated response chatcmpl-1: output: 'torch.OutOfMemoryError: CUDA "
        "out of memory. Tried to allocate 2.00 GiB', output_token_ids: None",
    ),
    "an ASGI traceback": (
        *UP,
        *READY,
        f"{API}ERROR:    Exception in ASGI application",
        f"{API}Traceback (most recent call last):",
        f"{API}starlette.requests.ClientDisconnect: gone",
        stats("10-09 12:03:00"),
    ),
    "the engine's goodbye after a stop": (
        *UP,
        *READY,
        f"{API}INFO 10-09 13:00:00 [launcher.py:100] [shutdown] API server: shutdown triggered",
        f"{CORE}INFO 10-09 13:00:00 [core.py:1313] [shutdown] EngineCore: trigger received signal=SIGTERM",
        f"{API}ERROR 10-09 13:00:01 [async_llm.py:700] AsyncLLM output_handler failed.",
        f"{API}ERROR 10-09 13:00:01 [async_llm.py:700] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        f"encountered "
        "an issue.",
        f"{API}INFO:     Application shutdown complete.",
    ),
    "the engine goes first when both are stopped": (
        *UP,
        *READY,
        f"{API}ERROR 10-09 13:00:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, "
        f"shutting down "
        "client.",
        *STOP,
    ),
    "Ctrl-C at a terminal": (
        *UP,
        *READY,
        f"^C{API}ERROR 10-09 13:00:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting "
        "down client.",
        "^CTraceback (most recent call last):",
        "asyncio.exceptions.CancelledError",
        "KeyboardInterrupt",
    ),
    "Ctrl-C in V0": (
        "INFO 03-19 06:27:09 api_server.py:528] vLLM API server version 0.6.3.post1",
        "INFO:     Application startup complete.",
        "INFO 03-19 08:17:28 launcher.py:57] Shutting down FastAPI HTTP server.",
        "ERROR 03-19 08:17:28 engine.py:300] KeyboardInterrupt('MQLLMEngine terminated')",
        "KeyboardInterrupt: MQLLMEngine terminated",
        "INFO:     Application shutdown complete.",
        "/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory "
        "objects to clean up at shutdown",
    ),
    "Ctrl-C while starting": (*UP, "Traceback (most recent call last):", '  File "x.py", line 1', "KeyboardInterrupt"),
    "SIGTERM while starting": (
        *UP,
        f"{CORE}ERROR 10-09 12:00:30 [core.py:1510] EngineCore failed to start.",
        f"{CORE}ERROR 10-09 12:00:30 [core.py:1510] RuntimeError: Did not receive response from front-end process "
        f"within "
        "5 minutes",
        "RuntimeError: Did not receive response from front-end process within 5 minutes",
        "Traceback (most recent call last):",
        '    raise KeyboardInterrupt("terminated")',
        "KeyboardInterrupt: terminated",
    ),
    "the time of a Slurm job is over": (
        *UP,
        *READY,
        "slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        f"{API}ERROR 10-09 13:00:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly",
    ),
    "the end of a program with an offline engine": (
        f"{CORE}INFO 10-09 12:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m'",
        "Processed prompts: 100%|####| 99/99 [00:42<00:00, 48.86it/s]",
        "ERROR 10-09 13:00:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down "
        "client.",
    ),
    "a failed server, then a good one": (
        *UP,
        f"{CORE}ERROR 10-09 12:00:30 [core.py:708] torch.OutOfMemoryError: CUDA out of memory.",
        GENERIC,
        *UP,
        *READY,
    ),
    "another program's traceback while it serves": (
        *UP,
        *READY,
        "Traceback (most recent call last):",
        "OSError: [Errno 98] Address already in use",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        stats("10-09 12:02:00"),
    ),
    "another program's traceback while it starts": (
        *UP,
        "Traceback (most recent call last):",
        "OSError: [Errno 98] Address already in use",
        f"{CORE}INFO 10-09 12:00:40 [gpu_model_runner.py:2392] Model loading took 4.2530 GiB and 1.175218 seconds",
    ),
    "another program cannot bind its port": (
        *UP,
        *READY,
        "INFO:     Started server process [4711]",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 9000): address already in use",
        "INFO:     Waiting for application shutdown.",
        "INFO:     Application shutdown complete.",
    ),
    "a client's Ctrl-C beside it": (*UP, *READY, "KeyboardInterrupt", stats("10-09 12:02:00")),
    "NCCL of a training worker": (
        *UP,
        "host1:52:53 [0] ras/client_support.cc:160 NCCL WARN Call to bind failed: Address already in use",
    ),
    "errors logged about alternatives": (
        *UP,
        f"{CORE}ERROR 10-09 12:00:30 [fa_utils.py:57] Cannot use FA version 2 is not supported due to FA2 is only "
        f"supported "
        "on devices with compute capability >= 8",
        f"{CORE}WARNING 10-09 12:00:31 [x.py:1] ImportError: No module named 'flashinfer'",
    ),
    "an engine that lives on after an error": (
        *UP,
        *READY,
        f"{CORE}ERROR 10-09 12:02:00 [core.py:400] Invocation of add_lora method failed",
        f"{CORE}ERROR 10-09 12:02:00 [core.py:400] torch.OutOfMemoryError: CUDA out of memory.",
        *(stats(f"10-09 12:03:{second}0") for second in range(4)),
    ),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_nothing_ended_it(case: str) -> None:
    assert diagnose(HEALTHY[case]) is None


# ---- start failures ----------------------------------------------------------------------------------------------


def in_engine(text: str) -> tuple[str, ...]:
    """As vLLM 0.11 prints a failing start of its engine."""
    error = f"{CORE}ERROR 10-09 12:00:30 [core.py:708] "
    return (
        *UP,
        f"{error}EngineCore failed to start.",
        f"{error}Traceback (most recent call last):",
        f'{error}  File "/x/gpu_worker.py", line 5, in load',
        f"{error}    raise ValueError(",
        f"{error}{text}",
        f"{CORE}Process EngineCore_DP0:",
        f"{CORE}Traceback (most recent call last):",
        f"{CORE}{text}",
        f"{API}Traceback (most recent call last):",
        f'{API}    raise RuntimeError("Engine core initialization failed. "',
        GENERIC,
    )


STARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oom", in_engine("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ("oom", in_engine("RuntimeError: NPU out of memory. Tried to allocate 1.50 GiB (NPU 0; 60.97 GiB total capacity)")),
    ("oom", in_engine("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space "
                      "hbm")),
    ("oom", in_engine("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")),
    ("gpu_busy", in_engine("AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current free "
                           "71 GiB.")),
    ("no_kv_memory", in_engine("ValueError: No available memory for the cache blocks. Try increasing it")),
    ("kv_too_small", in_engine("ValueError: To serve at least one request with the models's max seq len (4096), "
                               "(0.5 GiB KV)")),
    ("not_enough_gpus", in_engine("AssertionError: DP adjusted local rank 4 is out of bounds for 4 devices.")),
    ("not_enough_gpus", in_engine("RuntimeError: CUDA error: invalid device ordinal")),
    ("nccl", in_engine("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled "
                       "system error")),
    ("unsupported", in_engine("ValueError: No valid attention backend found for cuda with head_size: 80. Reasons: {}")),
    ("unsupported", in_engine("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9")),
    ("disk_full", in_engine("OSError: [Errno 28] No space left on device: '/home/user/.cache/vllm/x'")),
    ("nccl", in_engine("RuntimeError: NCCL error: unhandled system error. Last error: Error while creating shared "
                       "memory "
                       "segment /dev/shm/nccl-x (size 9637888): No space left on device")),
    ("unknown", in_engine("AttributeError: module 'triton' has no attribute 'language'")),
    ("tp_not_divisible", in_engine("AssertionError: 151936 is not divisible by 5")),
    # before any engine: the API process, in 0.11 with its name in front, in 0.33 bare
    ("max_model_len_too_long", (
        *UP[:2],
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        f"{API}  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=2048 or model_max_length=None in model's config.json).",
    )),
    ("bad_flag", (
        *UP[:2],
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig",
        "  Value error, max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128).",
        "    For further information visit https://errors.pydantic.dev/2.13/v/value_error",
    )),
    ("bad_flag", ("usage: vllm serve [model_tag] [options]",
                  "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp7' (choose from 'auto', 'fp8')")),
    ("bad_flag", ("api_server.py: error: unrecognized arguments: --swap-spce",)),
    ("port_in_use", (*UP[:2], f"{API}OSError: [Errno 98] Address already in use")),
    ("port_in_use", (
        "INFO 01-05 06:27:09 api_server.py:128] vLLM API server version 0.2.7",
        "INFO:     Started server process [9]",
        "INFO:     Application startup complete.",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        "INFO:     Waiting for application shutdown.",
        "INFO:     Application shutdown complete.",
    )),
    ("port_in_use", ("docker: Error response from daemon: driver failed: Bind for 0.0.0.0:8000 failed: port is already "
                     "allocated.",)),
    ("gated_model", (
        "huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-2-3)",
        "",
        "Cannot access gated repo for url https://huggingface.co/meta-llama/x/resolve/main/config.json.",
        "Access to model meta-llama/x is restricted and you are not in the authorized list.",
        "The above exception was the direct cause of the following exception:",
        "OSError: You are trying to access a gated repo.",
    )),
    ("model_not_found", (
        *UP[:2],
        f"{API}requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: "
        f"https://huggingface.co/api/models/a/b",
        f"{API}huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-2)",
        f"{API}Repository Not Found for url: https://huggingface.co/api/models/a/b.",
        f"{API}OSError: a/b is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'. If this is a private repository, pass a token; a gated repo needs one, too.",
    )),
    ("model_not_found", (
        *UP[:2],
        f"{API}urllib3.exceptions.NameResolutionError: <x>: Failed to resolve 'huggingface.co' ([Errno -3])",
        f"{API}OSError: We couldn't connect to 'https://huggingface.co' to load the files.",
    )),
    ("not_enough_gpus", (
        *UP[:2],
        f"{API}  Value error, World size (8) is larger than the number of available GPUs (4) in this node.",
    )),
    ("not_enough_gpus", ('docker: Error response from daemon: could not select device driver "" with capabilities: '
                         '[[gpu]].',)),
    # V0 and the first V1
    ("kv_too_small", (
        "INFO 03-19 06:27:09 api_server.py:528] vLLM API server version 0.6.3",
        "INFO 03-19 06:27:49 gpu_executor.py:122] # GPU blocks: 100, # CPU blocks: 4096",
        "Process SpawnProcess-1:",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored "
        "in KV "
        "cache (1600). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
        "engine.",
        "ERROR 03-19 06:27:50 api_server.py:186] RPCServer process died before responding to readiness probe",
    )),
    ("oom", (
        "INFO 04-02 06:27:09 [api_server.py:1034] vLLM API server version 0.8.2",
        "ERROR 04-02 06:28:00 [core.py:343] EngineCore hit an exception: Traceback (most recent call last):",
        "ERROR 04-02 06:28:00 [core.py:343] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
        "CRITICAL 04-02 06:28:00 [core_client.py:359] Got fatal signal from worker processes, shutting down. See stack "
        "trace above for root cause issue.",
        "Killed",
    )),
    ("unknown", (*UP, "Killed")),
    ("oom", (*UP, "[12345.678] Out of memory: Killed process 80 (VLLM::EngineCor) total-vm:1kB")),
    ("oom", (*UP, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been "
                  "OOM Killed.")),
    # two servers: the last one counts
    ("bad_flag", (*UP, *READY, *STOP, "usage: vllm [-h] [-v]", "vllm: error: unrecognized arguments: --x")),
    ("bad_flag", (*UP, *READY, *DEATH, "vllm: error: unrecognized arguments: --x")),
    ("port_in_use", (*UP, *READY, *STOP, *UP[:2], f"{API}OSError: [Errno 98] Address already in use")),
    # the terminal stays open and somebody presses Ctrl-C
    ("tp_not_divisible", (
        "INFO 02-26 08:54:31 config.py:908] Defaulting to use mp for distributed inference",
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        "^CTraceback (most recent call last):",
        "KeyboardInterrupt",
    )),
)  # fmt: skip


@pytest.mark.parametrize(("expected", "lines"), STARTS, ids=lambda value: value if isinstance(value, str) else "")
def test_why_a_start_failed(expected: str, lines: tuple[str, ...]) -> None:
    failure = diagnose(lines)
    assert failure is not None
    assert failure.kind == expected
    assert failure.hint
    assert "Engine core initialization failed" not in failure.line
    assert any(failure.line in line for line in lines)


def test_only_the_symptom_is_left_of_a_start() -> None:
    failure = diagnose((*UP, GENERIC))
    assert failure is not None
    assert failure.kind == "unknown"
    assert failure.line.startswith("RuntimeError: Engine core initialization failed")


def test_another_programs_error_does_not_explain_our_failed_start() -> None:
    lines = list(in_engine("AttributeError: module 'x' has no attribute 'y'"))
    lines.insert(3, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert kind(*lines) == "unknown"


def test_a_start_that_hangs_is_not_called_failed() -> None:
    assert (
        kind(*UP, f"{CORE}INFO 10-09 12:10:00 [shm_broadcast.py:466] No available shared memory broadcast block")
        is None
    )


# ---- deaths while serving ------------------------------------------------------------------------------------------

DEATHS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("engine_died", "illegal memory access", (*UP, *READY, stats("10-09 12:04:00"), *DEATH)),
    ("engine_died", "illegal memory access", (*UP, *READY, *DEATH, stats("10-09 12:05:05"))),
    ("engine_died", "illegal memory access", (stats("10-09 12:04:00"), *DEATH)),
    ("engine_died", "illegal memory access", DEATH),
    ("oom", "Tried to allocate", (
        *UP, *READY,
        f"{ASSERT}EngineCore encountered a fatal error.",
        f"{ASSERT}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total "
        f"capacity of "
        "79.11 GiB of which 10.00 MiB is free.",
        *DEATH[4:],
    )),
    ("oom", "CUDA out of memory", (*UP, *READY, f"{ASSERT}torch.OutOfMemoryError: CUDA out of memory.")),
    ("nccl", "collective operation timeout", (
        *UP, *READY,
        "(Worker_TP0 pid=81) [rank0]:[E1009 12:05:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=9)",
        f"{API}ERROR 10-09 12:05:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly",
        f"{API}ERROR 10-09 12:05:00 [async_llm.py:480] AsyncLLM output_handler failed.",
    )),
    ("engine_died", "died unexpectedly", (
        *UP, *READY,
        f"{API}ERROR 10-09 12:05:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, "
        f"shutting down.",
        f"{API}ERROR 10-09 12:05:00 [async_llm.py:480] AsyncLLM output_handler failed.",
        f"{API}INFO:     Shutting down",
    )),
    ("engine_died", "exited unexpectedly", (
        "(APIServer pid=70) INFO 10-09 12:01:00 [launcher.py:40] Starting vLLM server on http://0.0.0.0:8000",
        "INFO:     Started server process [70]",
        "INFO:     Application startup complete.",
        'INFO:     127.0.0.1:49120 - "POST /v1/completions HTTP/1.1" 200 OK',
        "(Worker pid=81) INFO 10-09 12:05:00 [multiproc_executor.py:843] Parent process exited, terminating worker "
        "queues",
        "(APIServer pid=70) WARNING 10-09 12:05:00 [core_client.py:817] [shutdown] MPClient: engine core exited "
        "unexpectedly; starting cleanup",
        "(APIServer pid=70) INFO 10-09 12:05:00 [core_client.py:770] [shutdown] MPClient: start timeout=default",
        "INFO:     Shutting down",
    )),
    ("engine_died", "exit code: -9", (
        *UP, *READY,
        f"{CORE}ERROR 10-09 12:05:00 [multiproc_executor.py:154] Worker proc VllmWorker-1 died unexpectedly (exit "
        f"code: "
        "-9), shutting down executor.",
        *DEATH[4:6],
    )),
    # 0.33: bare tracebacks, [shutdown] lines
    ("engine_died", "AttributeError", (
        "(APIServer pid=70) INFO 10-09 12:00:00 [api_utils.py:345]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.33.0\r",
        "(APIServer pid=70) INFO 10-09 12:01:00 [launcher.py:40] Starting vLLM server on http://0.0.0.0:8000",
        "INFO:     Started server process [70]",
        "INFO:     Application startup complete.",
        "(EngineCore pid=80) ERROR 10-09 12:05:00 [core.py:1512] EngineCore encountered a fatal error.",
        "(EngineCore pid=80) ERROR 10-09 12:05:00 [core.py:1512] AttributeError: 'X' object has no attribute 'y'",
        "(APIServer pid=70) WARNING 10-09 12:05:00 [core_client.py:818] [shutdown] MPClient: engine core exited "
        "unexpectedly; starting cleanup",
        "INFO:     Shutting down",
    )),
    # 0.9: two engines, no name before the API server's lines, stopped by itself
    ("engine_died", "no attribute 'dp_rank'", (
        "INFO 06-11 11:46:00 [api_server.py:1287] vLLM API server version 0.9.1",
        "INFO:     Application startup complete.",
        "(EngineCore_0 pid=1) ERROR 06-11 11:46:39 [core.py:517] EngineCore encountered a fatal error.",
        "(EngineCore_1 pid=2) ERROR 06-11 11:46:39 [core.py:517] EngineCore encountered a fatal error.",
        "(EngineCore_0 pid=1) ERROR 06-11 11:46:39 [core.py:517] AttributeError: 'P' object has no attribute 'dp_rank'",
        "(EngineCore_1 pid=2) ERROR 06-11 11:46:39 [core.py:517] AttributeError: 'P' object has no attribute 'dp_rank'",
        "ERROR 06-11 11:46:39 [async_llm.py:420] AsyncLLM output_handler failed.",
        "INFO 06-11 11:46:39 [launcher.py:80] Shutting down FastAPI HTTP server.",
    )),
    # V0
    ("engine_died", "device-side assert", (
        "INFO 05-26 22:00:00 api_server.py:151] vLLM API server version 0.4.2",
        "INFO:     Application startup complete.",
        "ERROR 05-26 22:40:00 async_llm_engine.py:43] Engine background task failed",
        "ERROR 05-26 22:40:00 async_llm_engine.py:43] Traceback (most recent call last):",
        "ERROR 05-26 22:40:00 async_llm_engine.py:43] RuntimeError: CUDA error: device-side assert triggered",
        "ERROR:    Exception in ASGI application",
        "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.",
        "^CINFO:     Shutting down",
    )),
    ("engine_died", "Segmentation fault", (*UP, *READY, "Fatal Python error: Segmentation fault")),
    ("engine_died", "Killed", (*UP, *READY, stats("10-09 12:04:00"), "run.sh: line 5:  4242 Killed                  "
                                                                     "vllm serve m")),
)  # fmt: skip


@pytest.mark.parametrize(("expected", "text", "lines"), DEATHS)
def test_why_an_engine_died(expected: str, text: str, lines: tuple[str, ...]) -> None:
    failure = diagnose(lines)
    assert failure is not None
    assert failure.kind == expected
    assert text in failure.line
    assert failure.hint


def test_sigkill_is_explained_without_blaming_a_setting() -> None:
    failure = diagnose((*UP, *READY, "Killed"))
    assert failure is not None
    assert failure.hint is not None
    assert "dmesg" in failure.hint


def test_a_restarted_engine_clears_its_death() -> None:
    lines = (*UP, *READY, *DEATH[:6], *(stats(f"10-09 12:06:{second}0") for second in range(4)))
    assert diagnose(lines) is None


def test_lines_left_over_from_several_engines_are_no_proof_of_life() -> None:
    lines = (*UP, *READY, *DEATH, *(stats("10-09 12:05:05") for _ in range(8)))
    assert kind(*lines) == "engine_died"


# ---- what the caller knows ------------------------------------------------------------------------------------------


def test_an_exit_that_nobody_asked_for_is_always_a_failure() -> None:
    quiet = diagnose((*UP, *READY), exit_code=0, ready=True)
    assert quiet is not None
    assert (quiet.kind, quiet.hint is not None and "exit code 0" in quiet.hint) == ("engine_died", True)
    early = diagnose(UP, exit_code=1, ready=False)
    assert early is not None
    assert early.kind == "unknown"
    assert diagnose((), exit_code=127) == diagnose((), exit_code=127)


@pytest.mark.parametrize(
    ("code", "word"),
    [(-9, "SIGKILL"), (137, "SIGKILL"), (-11, "SIGSEGV"), (134, "SIGABRT"), (127, "not found"), (-15, "SIGTERM")],
)
def test_exit_codes_are_read(code: int, word: str) -> None:
    failure = diagnose((), exit_code=code)
    assert failure is not None
    assert word in (failure.hint or "")
    assert f"exit code {code}" in failure.line


def test_a_doubtful_cause_counts_once_the_process_has_ended() -> None:
    lines = (*UP, "ImportError: libcudart.so.12: cannot open", f"{CORE}INFO 10-09 12:00:40 [x.py:1] going on")
    assert diagnose(lines) is None
    failure = diagnose(lines, exit_code=1, ready=False)
    assert failure is not None
    assert failure.line.startswith("ImportError")
    assert "reinstall" in (failure.hint or "")


def test_a_stop_that_was_not_ours_is_interrupted() -> None:
    failure = diagnose((*UP, *READY, *STOP), exit_code=0, ready=True)
    assert failure is not None
    assert failure.kind == "interrupted"


def test_the_caller_knows_better_whether_it_was_ready() -> None:
    lines = (*UP, f"{ASSERT}EngineCore hit an exception", f"{ASSERT}RuntimeError: broken")
    as_start = diagnose(lines, ready=False)
    as_death = diagnose(lines, ready=True)
    assert as_start is not None
    assert as_death is not None
    assert (as_start.kind, as_death.kind) == ("unknown", "engine_died")
    assert as_death.line == "RuntimeError: broken"


def test_an_error_in_flight_without_last_words() -> None:
    lines = (*UP, *READY, f"{ASSERT}torch.OutOfMemoryError: CUDA out of memory.")
    failure = diagnose(lines, exit_code=-9, ready=True)
    assert failure is not None
    assert failure.kind == "oom"


def test_a_hanging_engine_timed_out() -> None:
    failure = diagnose((*UP, f"{API}TimeoutError: Timed out waiting for engine core processes to start. Waited 600s"))
    assert failure is not None
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in (failure.hint or "")


# ---- form ------------------------------------------------------------------------------------------------------------


def test_the_line_is_short_plain_and_without_secrets() -> None:
    secret = "hf_" + "abcdefgh" * 4
    lines = (f"\x1b[1;36m{API}\x1b[0;0mOSError: {secret} is not a local folder" + " and so on" * 100,)
    failure = diagnose(lines)
    assert failure is not None
    assert len(failure.line) == 300
    assert secret not in failure.line
    assert failure.line.startswith("OSError: hf_... is not a local folder")


def test_a_repeated_traceback_costs_no_memory() -> None:
    diagnosis = Diagnosis()
    for line in UP:
        for parsed in parse(line):
            diagnosis.feed(parsed)
    for number in range(3 * CAUSES):
        for parsed in parse(f"{CORE}ERROR 10-09 12:00:30 [core.py:708] ValueError: number {number}"):
            diagnosis.feed(parsed)
    assert len(diagnosis._causes) == CAUSES
    failure = diagnosis.failure()
    assert failure is not None
    assert failure.line == "ValueError: number 0"


PREFIXES = (
    "vllm-1  | ",
    "Apr 11 19:21:34 host1 vllm[1356]: ",
    "2025-10-09T12:00:00.123456789Z stdout F ",
    "2025-10-09 12:00:00,123 ",
    "2025-10-09 12:00:00.123 | ",
    "[pod/vllm-0/server] ",
    "0: ",
    "> ",
)
CASES = (
    [(None, lines) for lines in HEALTHY.values()] + [(k, lines) for k, lines in STARTS] + [(k, d) for k, _, d in DEATHS]
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_in_front_changes_nothing(prefix: str) -> None:
    for expected, lines in CASES:
        assert kind(*(line if "^C" in line else prefix + line for line in lines)) == expected, lines


def test_colours_change_nothing() -> None:
    for expected, lines in CASES:
        coloured = [line.replace("(", "\x1b[1;36m(", 1).replace(") ", ")\x1b[0;0m ", 1) for line in lines]
        assert kind(*coloured) == expected, lines


@given(st.lists(st.one_of(st.sampled_from([*UP, *READY, *DEATH, *STOP, GENERIC]), st.text()), max_size=30))
@settings(max_examples=50, deadline=None)
def test_any_order_of_lines_and_any_text_gives_an_answer(lines: list[str]) -> None:
    failure = diagnose(lines)
    assert failure is None or len(failure.line) <= 300
    assert diagnose(lines, exit_code=1) is not None
