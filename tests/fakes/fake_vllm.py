"""A fake ``vllm serve``: a real process with vLLM's lines, routes, counters and exit codes, and faults on demand.

    python tests/fakes/fake_vllm.py serve MODEL --port 8000 --max-num-seqs 64 [--fake-fault dies_on_request:3]

Its batch model is in ``vllm_batch.py``, its faults in ``vllm_faults.py``. Environment: ``FAKE_VLLM_FAULT``,
``FAKE_VLLM_KV_TOKENS`` (65,536 at ``gpu_memory_utilization`` 0.92), ``FAKE_VLLM_GPUS`` (8), ``FAKE_VLLM_SLOW``
(multiplies the time of a step), ``FAKE_VLLM_ANSWER`` (mean tokens of an answer that may end by itself, 64).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import vllm_faults as faults

VERSION = "0.33.0"
MODEL_LEN = 40960
HEADS = 32
SWITCHES = {"enforce_eager", "trust_remote_code", "async_scheduling", "disable_log_stats"}
VALUES = {
    "host", "port", "served_model_name", "api_key", "tensor_parallel_size", "data_parallel_size",
    "pipeline_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "num_gpu_blocks_override", "block_size", "kv_cache_dtype", "load_format", "dtype", "quantization", "revision",
    "tokenizer", "seed", "max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config",
    "performance_mode", "api_server_count", "stream_interval", "fake_fault",
}  # fmt: skip


def read_flags(argv: list[str]) -> dict[str, Any]:
    """``--k v``, ``--k=v``, ``--k``, ``--no-k``; an unknown one ends the program as argparse would."""
    flags: dict[str, Any] = {"model": argv[0] if argv and not argv[0].startswith("-") else ""}
    words = argv[1:] if flags["model"] else argv
    unknown = []
    while words:
        word, words = words[0], words[1:]
        head, equals, value = word.partition("=")
        name = head.removeprefix("--").replace("-", "_").partition(".")[0]
        off = name.startswith("no_")
        name = name.removeprefix("no_")
        if name in SWITCHES or name.startswith(("enable_", "disable_")):
            flags[name] = not off
        elif name in VALUES and head.startswith("--"):
            if not equals:
                value, words = words[0], words[1:]
                while words and not words[0].startswith("--"):
                    words = words[1:]
            flags[name] = value
        elif head.startswith("-O"):
            flags["optimization_level"] = head[2:]
        else:
            unknown.append(word)
    if unknown:
        print("usage: vllm [-h] [-v] {chat,complete,serve,bench} ...", file=sys.stderr)
        print(f"vllm: error: unrecognized arguments: {' '.join(unknown)}", file=sys.stderr)
        sys.exit(2)
    return flags


class FakeServer:
    """One server: boots, listens, generates, dies or is stopped."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.name = flags.get("served_model_name", flags["model"])
        self.deaf = False
        self.kv_line = True
        self.stays = False
        self.dying: str | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.engines: list[Any] = []
        self.faults = faults.chosen(",".join((os.environ.get("FAKE_VLLM_FAULT", ""), flags.get("fake_fault", ""))))

    # What it says.

    def print(self, text: str) -> None:
        print(text, flush=True)

    def log(self, text: str, *, level: str = "INFO", engine: bool = False, rank: int = 0) -> None:
        who = f"APIServer pid={os.getpid()}"
        if engine:
            several = int(self.number("data_parallel_size", 1)) > 1
            name = f"EngineCore_DP{rank}" if several else "EngineCore"
            who = f"{name} pid={(self.child.pid if self.child else os.getpid() + 1) + rank}"
        for line in text.splitlines():
            self.print(f"({who}) {level} {time.strftime('%m-%d %H:%M:%S')} [fake.py:1] {line}")

    def end(self, code: int) -> None:
        """End at once, with the engine's process unless a fault keeps it."""
        if self.child is not None:
            self.child.kill()
        sys.stdout.flush()
        os._exit(code)

    def number(self, flag: str, default: float) -> float:
        return float(self.flags.get(flag, default))

    # How it starts.

    def boot(self) -> socket.socket:
        self.log(f"vLLM server version {VERSION}, serving model {self.flags['model']}")
        self.log(f"non-default args: {self.flags}")
        listener = self._bind()
        for fault, arg in self.faults:
            if fault.boot:
                fault.boot(self, arg)
        self._check()
        code = next((fault.child for fault, _ in self.faults if fault.child), "import time; time.sleep(1000)")
        # Dies with nobody: as vLLM's engine, it outlives a server that was killed.
        self.child = subprocess.Popen([sys.executable, "-S", "-E", "-c", code])
        self.log(f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{self.flags['model']}'", engine=True)
        return listener

    def _bind(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.flags.get("host", "127.0.0.1"), int(self.number("port", 8000))))
        except OSError as error:
            self.print("Traceback (most recent call last):")
            self.print(f"OSError: [Errno {error.errno}] Address already in use")
            sys.exit(1)
        return listener

    def _check(self) -> None:
        """The rules that vLLM holds a configuration to."""
        tp, world = int(self.number("tensor_parallel_size", 1)), int(os.environ.get("FAKE_VLLM_GPUS", "8"))
        self.model_len = int(self.number("max_model_len", MODEL_LEN))
        self.max_num_seqs = int(self.number("max_num_seqs", 256))
        batched = self.number("max_num_batched_tokens", 8192)
        if self.model_len > MODEL_LEN:
            self._refuse(
                f"User-specified max_model_len ({self.model_len}) is greater than the derived max_model_len"
                f" (max_position_embeddings={MODEL_LEN} or model_max_length=None in model's config.json)."
            )
        if HEADS % tp:
            self._refuse(f"Total number of attention heads ({HEADS}) must be divisible by tensor parallel size ({tp}).")
        if tp > world:
            self._refuse(f"World size ({tp}) is larger than the number of available GPUs ({world}) in this node.")
        if batched < self.max_num_seqs:
            self._refuse(
                f"max_num_batched_tokens ({batched:.0f}) must be greater than or equal to max_num_seqs"
                f" ({self.max_num_seqs})."
            )
        share = self.number("gpu_memory_utilization", 0.92) / 0.92
        kv_tokens = int(float(os.environ.get("FAKE_VLLM_KV_TOKENS", "65536")) * share)
        if "num_gpu_blocks_override" in self.flags:
            kv_tokens = int(self.number("num_gpu_blocks_override", 0)) * 16
        self.kv_tokens = kv_tokens // 16 * 16
        if self.kv_tokens < self.model_len:
            self.log(
                f"ValueError: To serve at least one request with the model's max seq len ({self.model_len}),"
                f" (1.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.1 GiB)."
                f" Based on the available memory, the estimated maximum model length is {self.kv_tokens}.",
                level="ERROR",
                engine=True,
            )
            self.log("RuntimeError: Engine core initialization failed. See root cause above.", level="ERROR")
            self.end(1)

    def _refuse(self, text: str) -> None:
        self.print("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig")
        self.print(f"  Value error, {text} [type=value_error]")
        self.end(1)

    # How it serves.

    async def serve(self, listener: socket.socket) -> None:
        import vllm_batch as batch
        import vllm_routes as routes
        from aiohttp import web

        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: None if self.deaf else stopped.set())
        slow = float(os.environ.get("FAKE_VLLM_SLOW", "1"))
        speed = batch.Speed()
        speed = replace(
            speed,
            t0=speed.t0 * slow,
            per_sequence=speed.per_sequence * slow / self.number("tensor_parallel_size", 1),
            per_prefill_token=speed.per_prefill_token * slow,
        )
        ranks = int(self.number("data_parallel_size", 1))
        self.engines = [
            batch.Engine(
                kv_tokens=self.kv_tokens,
                max_num_seqs=self.max_num_seqs,
                speed=speed,
                prefix_caching=self.flags.get("enable_prefix_caching", True),
            )
            for _ in range(ranks)
        ]
        for rank in range(ranks if self.kv_line else 0):
            self.log(
                f"GPU KV cache size: {self.kv_tokens:,} tokens, Maximum concurrency for {self.model_len:,} tokens"
                f" per request: {self.kv_tokens / self.model_len:.2f}x",
                engine=True,
                rank=rank,
            )
        beside = [
            asyncio.create_task(work) for work in (*(e.run() for e in self.engines), self._stats(), self._watchdog())
        ]
        beside += [asyncio.create_task(f.serve(self, arg)) for f, arg in self.faults if f.serve]
        runner = web.AppRunner(
            routes.Routes(self).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        self.print(f"INFO:     Started server process [{os.getpid()}]")
        self.print("INFO:     Application startup complete.")
        await stopped.wait()
        self.log("[shutdown] API server: shutdown triggered")
        for task in beside:
            task.cancel()
        if self.child:
            self.child.terminate()
        self.print("INFO:     Application shutdown complete.")
        os._exit(0)

    def engine_dies(self, kind: str) -> None:
        """The engine dies: its last words, 503 and 500 from now on, and a little later the server ends with 0."""
        if self.dying is None:
            self.dying = kind
            self.hang()
            if not self.stays:
                self._last_words(kind)
            if self.child is not None:
                self.child.kill()
            for engine in self.engines:
                for sequence in (*engine.running, *engine.waiting):
                    sequence.tokens.put_nowait("dead")

    def _last_words(self, kind: str) -> None:
        if kind in faults.DEATHS:
            for line in faults.DEATHS[kind][1]:
                self.log(line.partition(" ")[2], level="ERROR", engine=True)
        self.log("EngineCore encountered a fatal error.", level="ERROR", engine=True)
        self.log("AsyncLLM output_handler failed.", level="ERROR")
        self.log("EngineDeadError: EngineCore encountered an issue. See stack trace (above).", level="ERROR")

    def hang(self) -> None:
        for engine in self.engines:
            engine.hung = True

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            child = self.child
            daemon = any(fault.child == faults.DAEMON for fault, _ in self.faults)
            if self.dying is None and child is not None and child.poll() is not None and not daemon:
                self.log(
                    f"Engine core process EngineCore died unexpectedly (exit code: {child.poll()}).", level="ERROR"
                )
                self.engine_dies("engine")
            if self.dying is not None and not self.stays:
                await asyncio.sleep(0.3)
                self.print("INFO:     Shutting down")
                os._exit(0)

    async def _stats(self) -> None:
        every = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10"))
        before = [(0, 0)] * len(self.engines)
        while True:
            await asyncio.sleep(every)
            for index, engine in enumerate(self.engines):
                now = (engine.counters.prompt_tokens, engine.counters.generation_tokens)
                rates = [(new - old) / every for new, old in zip(now, before[index], strict=True)]
                before[index] = now
                if any(rates) or engine.running:
                    self.log(
                        f"Engine {index:03d}: Avg prompt throughput: {rates[0]:.1f} tokens/s, Avg generation"
                        f" throughput: {rates[1]:.1f} tokens/s, Running: {len(engine.running)} reqs, Waiting:"
                        f" {len(engine.waiting)} reqs, GPU KV cache usage: {100 * engine.kv_usage:.1f}%"
                    )


def main(argv: list[str]) -> None:
    if argv[:1] != ["serve"]:
        sys.exit("usage: fake_vllm.py serve MODEL [flags]")
    signal.alarm(900)  # whatever happens to the test that started it, it does not stay for ever
    server = FakeServer(read_flags(argv[1:]))
    listener = server.boot()
    asyncio.run(server.serve(listener))


if __name__ == "__main__":
    main(sys.argv[1:])
