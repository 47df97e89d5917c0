"""A completions server that computes nothing: fast, in a process of its own, with faults on demand.

    python tests/fakes/null_server.py --config '{"token_s": 0.002}'      # prints its port

It speaks enough of vLLM's HTTP for a load generator: ``/v1/completions`` and ``/v1/chat/completions``
(streamed or not; an answer has exactly ``max_tokens`` tokens, one per ``token_s``), ``/metrics``,
``/health``. ``POST /config`` changes its configuration and forgets what it saw, ``GET /seen`` tells what it
saw. The first number of a prompt (of a chat: of the last message) says what happens to the request: a
status to answer with, or one of the faults below; 1 is a plain answer.

Configuration: ``token_s``; ``gate`` {concurrency, total}: an answer ends only while exactly so many
requests are here (fewer once fewer of the total are left), so that a client that holds one too few never
gets on; ``metrics`` "on", "slow", "hang", "off", "empty", "broken", "frozen" or "busy" (never idle);
``health`` a status; ``die_after`` so many requests the server is dead: 500 to all, health 503.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from typing import Any

PLAIN, DROP, DROP_LATE, HANG, ERROR_INSIDE, NO_DONE, NO_FINISH, NO_JSON, ABORTED, HTML = 1, *range(700, 709)

DEFAULTS: dict[str, Any] = {"token_s": 0.001, "gate": None, "metrics": "on", "health": 200, "die_after": None}


class Answer:
    def __init__(self, connection: Connection, body: dict[str, Any]) -> None:
        self.connection, self.stream = connection, bool(body.get("stream"))
        self.chat = "messages" in body
        prompt = body["messages"][-1]["content"].split() if self.chat else body["prompt"]
        self.numbers = [int(n) for n in prompt]
        self.fault, self.total, self.written = self.numbers[0], int(body["max_tokens"]), 0

    def tick(self) -> bool:
        """One more token; whether the answer may end."""
        if self.written < self.total:
            self.written += 1
            if self.stream and self.fault != HANG:
                self.connection.chunk(self.event(self.written == self.total and self.fault != NO_FINISH))
            if self.fault == DROP_LATE and self.written * 2 >= self.total:
                self.connection.transport.abort()
            if self.fault == ERROR_INSIDE and self.written * 2 >= self.total:
                self.total = self.written
        return self.written >= self.total and self.fault != HANG

    def event(self, last: bool) -> bytes:
        finish = ("abort" if self.fault == ABORTED else "length") if last else None
        part = {"delta": {"content": "x "}} if self.chat else {"text": "x "}
        if self.fault == NO_JSON:
            return b"data: {broken\n\n"
        return b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, **part, "finish_reason": finish}]}).encode()

    def end(self) -> None:
        usage = {"prompt_tokens": len(self.numbers), "completion_tokens": self.written}
        if self.stream:
            if self.fault == ERROR_INSIDE:
                self.connection.chunk(b'data: {"error": {"message": "engine broke", "code": 500}}\n\n')
            else:
                self.connection.chunk(b"data: %s\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
            self.connection.chunk(b"" if self.fault == NO_DONE else b"data: [DONE]\n\n")
            self.connection.transport.write(b"0\r\n\r\n")
            return
        finish = None if self.fault == NO_FINISH else "abort" if self.fault == ABORTED else "length"
        text = "x " * self.written
        part: dict[str, Any] = {"message": {"content": text}} if self.chat else {"text": text}
        data = {"choices": [{"index": 0, **part, "finish_reason": finish}], "usage": usage}
        if self.fault == ERROR_INSIDE:
            data = {"error": {"message": "engine broke", "code": 500}}
        raw = b"{broken" if self.fault == NO_JSON else json.dumps(data).encode()
        self.connection.answer(200, raw)


class Server:
    def __init__(self, config: dict[str, Any]) -> None:
        self.tokens = self.prompts = 0
        self.active: dict[Answer, None] = {}
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = {**DEFAULTS, **config}
        self.seen: dict[str, Any] = {
            "most": 0,
            "arrived": [],
            "ended": 0,
            "gone": 0,
            "bodies": [],
            "headers": {},
            "connections": 0,
        }

    def begin(self, answer: Answer) -> None:
        self.active[answer] = None
        self.prompts += len(answer.numbers)
        self.seen["arrived"].append(answer.numbers[1] if len(answer.numbers) > 1 else answer.numbers[0])
        self.seen["most"] = max(self.seen["most"], len(self.active))

    def leave(self, answer: Answer, how: str) -> None:
        if self.active.pop(answer, 0) is None:
            self.seen[how] += 1
            answer.connection.current = None

    def may_end(self) -> bool:
        gate = self.config["gate"]
        left = 0 if gate is None else gate["total"] - self.seen["ended"] - self.seen["gone"]
        return gate is None or len(self.active) == min(gate["concurrency"], left)

    async def run(self) -> None:
        due = asyncio.get_running_loop().time()
        while True:
            # Behind by a few steps: catch up; by more: go on from here.
            now = asyncio.get_running_loop().time()
            due = max(due + self.config["token_s"], now - 0.05)
            await asyncio.sleep(max(0.0, due - now))
            for answer in list(self.active):
                self.tokens += answer.written < answer.total
                if answer.tick() and answer in self.active and self.may_end():
                    self.leave(answer, "ended")
                    answer.end()

    def metrics(self) -> bytes:
        kind = self.config["metrics"]
        if kind in ("empty", "broken"):
            return b"" if kind == "empty" else b"<html>not metrics {\n"
        label = '{engine="0",model_name="null"}'
        values = {
            "num_requests_running": ("gauge", len(self.active) + (kind == "busy")),
            "num_requests_waiting": ("gauge", 0),
            "kv_cache_usage_perc": ("gauge", min(1.0, len(self.active) / 1000)),
            "prompt_tokens_total": ("counter", self.prompts),
            "generation_tokens_total": ("counter", 0 if kind == "frozen" else self.tokens),
            "num_preemptions_total": ("counter", 0),
            "prefix_cache_queries_total": ("counter", self.prompts),
            "prefix_cache_hits_total": ("counter", 0),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# HELP vllm:{name} x.", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value}"]
        return "\n".join([*lines, ""]).encode()


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server, self.data = server, b""
        self.current: Answer | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.seen["connections"] += 1

    def connection_lost(self, error: Exception | None) -> None:
        if self.current is not None:
            self.server.leave(self.current, "gone")

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (head := self.data.find(b"\r\n\r\n")) >= 0:
            first, *lines = self.data[:head].decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            end = head + 4 + int(headers.get("content-length", 0))
            if len(self.data) < end:
                return
            body, self.data = self.data[head + 4 : end], self.data[end:]
            self.request(*first.split(" ")[:2], headers, body)

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        server = self.server
        if path == "/config":
            server.configure(json.loads(body))
            self.answer(200, b"{}")
        elif path == "/seen":
            self.answer(200, json.dumps({**server.seen, "active": len(server.active)}).encode())
        elif path == "/health":
            self.answer(503 if self.dead() else server.config["health"], b"")
        elif path == "/metrics":
            if server.config["metrics"] == "slow":
                asyncio.get_running_loop().call_later(0.4, lambda: self.answer(200, server.metrics()))
            elif server.config["metrics"] != "hang":
                self.answer(404 if server.config["metrics"] == "off" else 200, server.metrics())
        else:
            self.complete(path, headers, json.loads(body))

    def dead(self) -> bool:
        after = self.server.config["die_after"]
        return after is not None and len(self.server.seen["arrived"]) > after

    def complete(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        seen = self.server.seen
        seen["headers"] = {**headers, "path": path}
        if len(seen["bodies"]) < 50:
            seen["bodies"].append(body)
        answer = Answer(self, body)
        if self.dead() or answer.fault in range(300, 600):
            seen["arrived"].append(answer.numbers[-1])
            status = 500 if self.dead() else answer.fault
            error = {"message": f"no: {headers.get('authorization')} 'input': 'secret text'"}
            self.answer(status, json.dumps({"error": error}).encode())
        elif answer.fault == HTML:
            self.answer(200, b"<html>not a completions server</html>")
        elif answer.fault == DROP:
            self.transport.close()
        else:
            self.current = answer
            self.server.begin(answer)
            if answer.stream:
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                self.transport.write(head)

    def answer(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def chunk(self, data: bytes) -> None:
        if data:
            self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main(config: dict[str, Any], port: int) -> None:
    server = Server(config)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    loop.add_signal_handler(signal.SIGTERM, lambda: os._exit(0))
    # The test that started this server is gone when its end of stdin is.
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(0, 1) else os._exit(0))
    await server.run()


if __name__ == "__main__":
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={})
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(arguments.config, arguments.port))
