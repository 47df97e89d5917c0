"""A completions server that computes nothing: what a load generator is measured against.

    python -m autotune.engines.nullserver --config '{"token_s": 0.02}'     # prints its port; ends with its stdin

It speaks enough of vLLM's HTTP for a load generator: ``/v1/completions`` and ``/v1/chat/completions``, streamed or
not, ``/v1/models``, ``/health`` and ``/metrics``. An answer has exactly ``max_tokens`` tokens. Each answer gets one
token every ``token_s`` seconds, all of them in one step, as an engine does, and each token of a stream is an event
and a write of its own; with ``token_s`` 0 an answer is written at once. ``POST /config`` changes ``token_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

MODEL = "null"
WORD = "x "
"""The text of every token."""
DEFAULTS: Mapping[str, Any] = {"token_s": 0.02}
CATCH_UP_S = 0.05
"""A server that is behind by more than this goes on from where it is."""


class Answer:
    """One answer being written."""

    def __init__(self, connection: Connection, body: Mapping[str, Any], *, chat: bool) -> None:
        self.connection, self.chat = connection, chat
        self.stream = bool(body.get("stream"))
        self.prompt_tokens = _prompt_tokens(body)
        self.total = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        self.written = 0
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{id(self):032x}"
        self._event = self.event() if self.stream else b""

    def step(self) -> bool:
        """One more token; whether the answer may end."""
        if self.written < self.total:
            self.written += 1
            if self.stream:
                self.write_token(last=self.written == self.total)
        return self.written >= self.total

    def write_token(self, *, last: bool) -> None:
        """The event of one token."""
        self.connection.chunk(self.event("length") if last else self._event)

    def event(self, finish: str | None = None) -> bytes:
        """One token as vLLM says it: about 220 bytes."""
        part = {"delta": {"content": WORD}} if self.chat else {"text": WORD}
        return self._data([{"index": 0, **part, "logprobs": None, "finish_reason": finish, "stop_reason": None}])

    def end(self) -> None:
        """What comes after the last token."""
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.written}
        usage["total_tokens"] = sum(usage.values())
        if self.stream:
            self.connection.chunk(self._data([], usage=usage) + b"data: [DONE]\n\n")
            self.connection.end_of_chunks()
            return
        text = WORD * self.written
        part: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length"}
        self.connection.answer(200, json.dumps(self._object([choice], usage=usage)).encode())

    def _data(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: %s\n\n" % json.dumps(self._object(choices, **more), separators=(",", ":")).encode()

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else f"chat.completion{'.chunk' if self.stream else ''}"
        return {"id": self._id, "object": kind, "created": 0, "model": MODEL, "choices": choices, **more}


class Server:
    """The answers being written, and the counters."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.generation_tokens = self.prompt_tokens = 0
        self.active: dict[Answer, None] = {}
        self.configure(config)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Another pace."""
        self.config = {**DEFAULTS, **config}

    def begin(self, answer: Answer) -> None:
        """A request has come."""
        self.active[answer] = None
        self.prompt_tokens += answer.prompt_tokens
        if not self.config["token_s"]:
            for _ in range(answer.total):
                self.step(answer)

    def leave(self, answer: Answer, how: str) -> None:
        """A request is over: ``ended``, or ``gone`` with its connection."""
        if answer in self.active:
            del self.active[answer]
            answer.connection.current = None

    def may_end(self, answer: Answer) -> bool:
        """Whether an answer that is written may end."""
        return True

    def step(self, answer: Answer) -> None:
        """One more token of one answer."""
        self.generation_tokens += answer.written < answer.total
        if answer.step() and answer in self.active and self.may_end(answer):
            self.leave(answer, "ended")
            answer.end()

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            now = loop.time()
            due = max(due + (self.config["token_s"] or CATCH_UP_S), now - CATCH_UP_S)
            await asyncio.sleep(max(0.0, due - now))
            for answer in list(self.active):
                self.step(answer)

    def counters(self) -> dict[str, tuple[str, float]]:
        """Name, kind and value of what the page of metrics says."""
        return {
            "num_requests_running": ("gauge", len(self.active)),
            "num_requests_waiting": ("gauge", 0),
            "kv_cache_usage_perc": ("gauge", min(1.0, len(self.active) / 10_000)),
            "prompt_tokens_total": ("counter", self.prompt_tokens),
            "generation_tokens_total": ("counter", self.generation_tokens),
            "num_preemptions_total": ("counter", 0),
            "prefix_cache_queries_total": ("counter", self.prompt_tokens),
            "prefix_cache_hits_total": ("counter", 0),
        }

    def metrics(self) -> bytes:
        """The page of metrics, with vLLM's names."""
        label = f'{{engine="0",model_name="{MODEL}"}}'
        found = self.counters().items()
        return "".join(f"# TYPE vllm:{k} {kind}\nvllm:{k}{label} {value}\n" for k, (kind, value) in found).encode()


class Connection(asyncio.Protocol):
    """One connection of a client; its requests come one after the other."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server, self._data = server, b""
        self.current: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's: a client has connected."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's: the client is gone, and gives up its answer."""
        if self.current is not None:
            self.server.leave(self.current, "gone")

    def data_received(self, data: bytes) -> None:
        """Asyncio's: a piece of a request, or several requests."""
        self._data += data
        while (head := self._data.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._data[:head].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            end = head + 4 + int(headers.get("content-length", 0))
            if len(self._data) < end:
                return
            body, self._data = self._data[head + 4 : end], self._data[end:]
            self.request(first.split(" ")[1].split("?")[0], headers, body)

    def request(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """One whole request."""
        if path.endswith("/completions"):
            self.complete(path, headers, json.loads(body))
        elif path == "/metrics":
            self.answer(200, self.server.metrics(), "text/plain")
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 20}]}
            self.answer(200, json.dumps(models).encode())
        elif path == "/config":
            self.server.configure(json.loads(body))
            self.answer(200, b"{}")
        else:
            self.answer(200 if path == "/health" else 404, b"{}")

    def complete(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        """A request for an answer."""
        self.start(Answer(self, body, chat="chat" in path))

    def start(self, answer: Answer) -> None:
        """Begin to answer."""
        self.current = answer
        if answer.stream:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        self.server.begin(answer)

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A whole answer."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def chunk(self, data: bytes) -> None:
        """One piece of a stream."""
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_of_chunks(self) -> None:
        """The end of a stream."""
        self.transport.write(b"0\r\n\r\n")


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    """A number for ``usage``: token ids, or words."""
    prompt = body.get("prompt")
    if prompt is None:
        return sum(len(str(message.get("content")).split()) for message in body.get("messages", ()))
    return len(prompt) if isinstance(prompt, list) else len(str(prompt).split())


async def serve(server: Server, connection: type[Connection] = Connection, port: int = 0) -> None:
    """Listen on the loopback, print the port, answer until stdin ends (whoever started us is gone) or SIGTERM."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: connection(server), "127.0.0.1", port, backlog=4096)
    sys.stdout.write(f"{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    loop.add_signal_handler(signal.SIGTERM, os._exit, 0)
    stdin = sys.stdin.fileno()
    loop.add_reader(stdin, lambda: None if os.read(stdin, 1) else os._exit(0))
    async with listening:
        await server.run()


@contextmanager
def started(*, script: Path | None = None, config: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A null server in a process of its own; its address. ``script``: another program that prints its port."""
    program = ["-m", "autotune.engines.nullserver"] if script is None else [str(script)]
    argv = [sys.executable, *program, "--config", json.dumps(dict(config or {}))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def arguments() -> argparse.Namespace:
    """``--port`` and ``--config``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON; see above.")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    asyncio.run(serve(Server(given.config), port=given.port))
