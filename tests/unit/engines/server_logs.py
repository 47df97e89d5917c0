"""Logs of the shape of real ones, written for the tests: one for each version and way of printing."""

from __future__ import annotations

import json

API = "(APIServer pid=70) "
CORE = "(EngineCore pid=80) "


def stats(
    stamp: str,
    rate: float = 100.0,
    *,
    engine: int = 0,
    front: str = API,
    running: int = 3,
    kv: float = 1.0,
    head: str = "[loggers.py:271] ",
) -> str:
    """A line of vLLM 0.8 and later."""
    return (
        f"{front}INFO {stamp} {head}Engine {engine:03d}: Avg prompt throughput: 10.0 tokens/s, Avg generation "
        f"throughput: "
        f"{rate} tokens/s, Running: {running} reqs, Waiting: 2 reqs, GPU KV cache usage: {kv}%, "
        "Prefix cache hit rate: 40.0%"
    )


def kv_line(tokens: str, front: str = CORE) -> str:
    """Capacity as vLLM 0.11 prints it."""
    return f"{front}INFO 10-09 12:00:40 [kv_cache_utils.py:864] GPU KV cache size: {tokens} tokens"


def engine_start(front: str = CORE, version: str = "0.11.0") -> str:
    """Printed once by each engine process."""
    return (
        f"{front}INFO 10-09 12:00:20 [core.py:77] Initializing a V1 LLM engine (v{version}) with config: model='m', "
        "block_size=16"
    )


V0_JOURNALD = """\
Apr 11 19:21:00 h vllm[9]: INFO 04-11 19:21:00 api_server.py:149] vLLM API server version 0.4.1
Apr 11 19:21:00 h vllm[9]: INFO 04-11 19:21:00 api_server.py:150] args: Namespace(host=None, block_size=16, seed=0)
Apr 11 19:21:20 h vllm[9]: INFO 04-11 19:21:20 gpu_executor.py:94] # GPU blocks: 100, # CPU blocks: 4096
Apr 11 19:21:34 h vllm[9]: INFO 04-11 19:21:34 metrics.py:218] Avg prompt throughput: 9.0 tokens/s, Avg generation \
throughput: 2.8 tokens/s, Running: 1 reqs, Swapped: 4 reqs, Pending: 7 reqs, GPU KV cache usage: 2.5%, CPU KV cache \
usage: 90.0%
Apr 11 19:21:34 h vllm[9]: INFO 04-11 19:21:34 metrics.py:229] Prefix cache hit rate: GPU: 12.50%, CPU: 0.00%
"""

TP2 = "\n".join(
    [
        "\x1b[1;36m(APIServer pid=70)\x1b[0;0m INFO 10-09 12:00:00 [api_server.py:1896] vLLM API server version 0.10.2",
        engine_start(),
        kv_line("2,000"),
        kv_line("1,984"),
        "INFO:     Application startup complete.",
        stats("10-09 12:01:00"),
    ]
)

UNNAMED_TP4 = "\n".join(
    [
        "INFO 10-09 12:00:00 [api_server.py:1043] vLLM API server version 0.8.5.post1",
        engine_start(""),
        *(kv_line(tokens, "") for tokens in ("2,000", "1,984", "1,984", "2,016")),
        stats("10-09 12:01:00", front=""),
    ]
)

UNNAMED_DP2 = "\n".join(
    [
        "INFO 10-09 12:00:00 [api_server.py:1043] vLLM API server version 0.9.1",
        engine_start(""),
        engine_start(""),
        kv_line("2,000", ""),
        kv_line("1,000", ""),
        stats("10-09 12:01:00", 10.0, front=""),
        stats("10-09 12:01:00", 20.5, engine=1, front="", kv=7.5),
    ]
)

DP2_TP2 = "\n".join(
    [
        "(APIServer pid=70) INFO 10-09 12:00:00 [utils.py:287]  █ █  █  version 0.20.0\r",
        engine_start("(EngineCore_DP0 pid=80) "),
        engine_start("(EngineCore_DP1 pid=81) "),
        kv_line("2,000", "(EngineCore_DP0 pid=80) "),
        kv_line("3,000", "(EngineCore_DP1 pid=81) "),
        kv_line("1,984", "(EngineCore_DP0 pid=80) "),
        kv_line("3,000", "(EngineCore_DP1 pid=81) "),
        *(stats(f"10-09 12:01:{10 * tick:02d}", 50.0 + tick, engine=engine) for tick in range(3) for engine in (0, 1)),
    ]
)

CPU_033 = """\
(APIServer pid=70) INFO 10-09 12:00:00 [api_utils.py:345] \r
(APIServer pid=70) INFO 10-09 12:00:00 [api_utils.py:345]   █▄█▀ █     █     █     █  model   m\r
(APIServer pid=70) INFO 10-09 12:00:00 [api_utils.py:345]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.33.0\r
(EngineCore pid=80) INFO 10-09 12:00:40 [kv_cache_utils.py:2146] CPU KV cache size: 46,592 tokens, Maximum concurrency \
for 2,048 tokens per request: 22.75x
(APIServer pid=70) INFO 10-09 12:01:00 [launcher.py:40] Starting vLLM server on http://0.0.0.0:8000
INFO:     Application startup complete.
(APIServer pid=70) INFO 10-09 12:01:10 [loggers.py:273] Engine 000: Avg prompt throughput: 1.5 tokens/s, Avg \
generation throughput: 33.3 tokens/s, Running: 8 reqs, Waiting: 5 reqs, Deferred: 2 reqs, KV fetch: 3 waiting to \
start, 1 in progress, 4 completed waiting, Preemptions: 6, CPU KV cache usage: 87.5%, Corrupted: 0 reqs, External \
prefix cache hit rate: 11.0%, MM cache hit rate: 22.0%
(APIServer pid=70) INFO 10-09 12:01:10 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 3.43, Accepted \
throughput: 999.0 tokens/s, Drafted throughput: 0.11 tokens/s, Accepted: 85 tokens, Avg Draft acceptance rate: 81.0%
"""

AGGREGATED = "\n".join(
    [
        engine_start("(EngineCore_DP0 pid=80) ", "0.30.0"),
        stats("10-09 12:01:00", 400.0).replace("Engine 000:", "4 Engines Aggregated:"),
    ]
)

JSON_033 = "\n".join(
    json.dumps(
        {
            "asctime": f"2026-10-09 12:01:{second}0,123",
            "levelname": "INFO",
            "name": "vllm.v1.metrics.loggers",
            "processName": "APIServer",
            "process": 70,
            "message": stats("", 10.0 + second, front="").partition("] ")[2],
        }
    )
    for second in range(2)
)

DOCKER_JSON = "\n".join(
    json.dumps({"log": f"\x1b[1;36m{line}\n", "stream": "stdout", "time": "2025-10-09T12:01:00.1Z"})
    for line in TP2.splitlines()
)

TWO_RUNS = "\n".join(
    [
        *DP2_TP2.splitlines(),
        "(APIServer pid=90) INFO 10-09 13:00:00 [utils.py:287]  █ █  █  version 0.20.1",
        engine_start("(EngineCore pid=91) ", "0.20.1"),
        kv_line("500", "(EngineCore pid=91) "),
        stats("10-09 13:05:00", 7.0, front="(APIServer pid=90) "),
    ]
)

COMPOSE_PAIR = "\n".join(
    [
        "vllm-a-1  | INFO 10-09 12:00:00 [api_server.py:1896] vLLM API server version 0.9.0",
        "vllm-b-1  | INFO 10-09 12:00:01 [api_server.py:1896] vLLM API server version 0.9.0",
        kv_line("1,000", "vllm-a-1  | "),
        kv_line("2,000", "vllm-b-1  | "),
        stats("10-09 12:01:00", 10.0, front="vllm-a-1  | "),
        stats("10-09 12:01:03", 20.0, front="vllm-b-1  | "),
        stats("10-09 12:01:10", 11.0, front="vllm-a-1  | "),
    ]
)

RAY_PAIR = "\n".join(
    line
    for server, core in (("5", "50"), ("6", "60"))
    for line in (engine_start(f"(Srv pid={server}) (EngineCore_DP0 pid={core}) "),)
) + "\n".join(
    [
        "",
        *(
            kv_line("286", f"(Srv pid={server}) (EngineCore_DP0 pid={core}) ")
            for server, core in (("5", "50"), ("6", "60"))
        ),
    ]
)

PROGRESS_BARS = (
    "Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]\r"
    "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.0s/it]\r"
    f"{stats('10-09 12:01:00')}\r\n"
    f"Capturing CUDA graphs:  50%|#####     | 33/67{stats('10-09 12:01:10', 90.0)}\n"
)
