"""What the fake server answers: vLLM's routes, status codes and counters."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import vllm_batch as batch
import vllm_faults as faults
from aiohttp import web

VERSION = "0.33.0"


class Routes:
    """The HTTP side of one fake server (``server``: a ``FakeServer``)."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.key = os.environ.get("VLLM_API_KEY")
        self.requests = itertools.count(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            app.router.add_get("/server_info", self._info)
            app.router.add_post("/reset_prefix_cache", self._reset)
        return app

    async def _version(self, request: Any) -> Any:
        return web.json_response({"version": VERSION})

    def error(self, status: int, kind: str, text: str) -> Any:
        return web.json_response({"error": {"message": text, "type": kind, "code": status}}, status=status)

    async def _health(self, request: Any) -> Any:
        for fault, arg in self.server.faults:
            if fault.health:
                await fault.health(self.server, arg)
        return web.Response(status=503 if self.server.dying else 200)

    async def _models(self, request: Any) -> Any:
        entry = {
            "id": self.server.name,
            "object": "model",
            "root": self.server.flags["model"],
            "parent": None,
            "max_model_len": self.server.model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _info(self, request: Any) -> Any:
        config = {
            "model_config": {
                "model": self.server.flags["model"],
                "max_model_len": self.server.model_len,
                "hf_token": None,
            },
            "scheduler_config": {"max_num_seqs": self.server.max_num_seqs},
            "parallel_config": {"data_parallel_size": len(self.server.engines)},
        }
        return web.json_response({"vllm_config": config})

    async def _reset(self, request: Any) -> Any:
        busy = any(engine.running for engine in self.server.engines)
        for engine in self.server.engines:
            engine.forget_prefixes()
        return web.json_response({"success": not busy})

    async def _metrics(self, request: Any) -> Any:
        lines = []
        gauges = {
            "num_requests_running": lambda e: len(e.running),
            "num_requests_waiting": lambda e: len(e.waiting),
            "kv_cache_usage_perc": lambda e: e.kv_usage,
        }
        counters = {
            "prompt_tokens": lambda e: e.counters.prompt_tokens,
            "generation_tokens": lambda e: e.counters.generation_tokens,
            "num_preemptions": lambda e: e.counters.preemptions,
            "prefix_cache_queries": lambda e: e.counters.prefix_queries,
            "prefix_cache_hits": lambda e: e.counters.prefix_hits,
        }
        for kind, table in (("gauge", gauges), ("counter", counters)):
            for name, read in table.items():
                full = f"vllm:{name}" + ("_total" if kind == "counter" else "")
                lines += [f"# HELP {full} {name}", f"# TYPE {full} {kind}"]
                for index, engine in enumerate(self.server.engines):
                    labels = f'{{engine="{index}",model_name="{self.server.name}"}}'
                    lines.append(f"{full}{labels} {float(read(engine))}")
        lines += ["# HELP vllm:cache_config_info cache", "# TYPE vllm:cache_config_info gauge"]
        for index in range(len(self.server.engines)):
            blocks = self.server.kv_tokens // 16 * len(self.server.engines)
            lines.append(
                f'vllm:cache_config_info{{block_size="16",engine="{index}",kv_cache_size_tokens="{self.server.kv_tokens}",'
                f'num_gpu_blocks="{blocks}"}} 1.0'
            )
        return web.Response(text="\n".join(lines) + "\n")

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        words = [str(prompt)] if prompt is not None else [m["content"] for m in body["messages"]]
        ids = [sum(word.encode()) % 32000 for text in words for word in text.split()]
        return ids if prompt is not None else [1, *ids, 2, 3]

    async def _tokenize(self, request: Any) -> Any:
        ids = self._tokens(await request.json())
        return web.json_response({"count": len(ids), "max_model_len": self.server.model_len, "tokens": ids})

    async def _complete(self, request: Any) -> Any:
        body = await request.json()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return self.error(401, "Unauthorized", "Unauthorized")
        if body.get("model") != self.server.name:
            return self.error(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.")
        number = next(self.requests)
        for fault, arg in self.server.faults:
            answer = await fault.request(self, arg, number) if fault.request else None
            if answer == faults.DROP:
                request.transport.abort()
                return web.Response()
            if answer is not None:
                return answer
        prompt = self._tokens(body)
        if len(prompt) >= self.server.model_len:
            limit = self.server.model_len
            text = f"This model's maximum context length is {limit} tokens. However, your prompt is longer."
            return self.error(400, "BadRequestError", text)
        limit = min(int(body.get("max_tokens") or self.server.model_len), self.server.model_len - len(prompt))
        natural = batch.natural_length(prompt, float(os.environ.get("FAKE_VLLM_ANSWER", "64")))
        long = bool(body.get("ignore_eos")) or natural >= limit
        sequence = batch.Sequence(
            prompt=prompt,
            limit=limit if long else natural,
            finish="length" if long else "stop",
            salt=str(body.get("cache_salt", "")),
        )
        if self.server.dying:
            return self.error(500, "InternalServerError", "EngineCore encountered an issue.")
        engine = min(self.server.engines, key=lambda e: len(e.running) + len(e.waiting))
        engine.add(sequence)
        try:
            if body.get("stream"):
                return await self._stream(request, body, sequence)
            words = []
            while (word := await sequence.tokens.get()) not in (None, "dead"):
                words.append(word)
        finally:
            if sequence.done < sequence.limit:
                engine.abort(sequence)
        if word == "dead":
            return self.error(500, "InternalServerError", "EngineCore encountered an issue.")
        text = "".join(filter(None, words))
        chat = "messages" in body
        choice = {"index": 0, "finish_reason": sequence.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        return web.json_response(
            {
                "id": f"cmpl-{number}",
                "object": kind,
                "model": self.server.name,
                "choices": [choice],
                "usage": usage(sequence),
            }
        )

    async def _stream(self, request: Any, body: dict[str, Any], sequence: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: Any) -> None:
            await response.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

        chat = "messages" in body
        while (word := await sequence.tokens.get()) not in (None, "dead"):
            last = sequence.done >= sequence.limit and sequence.tokens.qsize() <= 1
            choice = {"index": 0, "finish_reason": sequence.finish if last else None}
            choice |= {"delta": {"content": word}} if chat else {"text": word}
            await send({"object": "chunk", "model": self.server.name, "choices": [choice]})
        if word == "dead":
            await send({"error": {"message": "EngineCore encountered an issue.", "code": 500}})
        elif (body.get("stream_options") or {}).get("include_usage"):
            await send({"object": "chunk", "model": self.server.name, "choices": [], "usage": usage(sequence)})
        await send(b"[DONE]")
        return response


def usage(sequence: Any) -> dict[str, int]:
    prompt, output = len(sequence.prompt), sequence.done
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
