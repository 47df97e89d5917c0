"""The null server of the package with faults on demand, and a memory of what it saw.

    python tests/fakes/null_server.py --config '{"token_s": 0.002}'      # prints its port

``POST /config`` changes its configuration and forgets what it saw, ``POST /seen`` tells what it saw. Where the first
word of a prompt (of a chat: of the last message) is a number, it says what happens to the request: a status to
answer with, or one of the faults below; 1 is a plain answer.

Configuration: ``token_s``; ``gate`` {concurrency, total}: an answer ends only while exactly so many requests are
here (fewer once fewer of the total are left), so that a client that holds one too few never gets on; ``lengths``:
tokens of the answers in the order in which the requests come, again and again, whatever they ask for; ``metrics``
"on", "slow", "hang", "off", "empty", "broken", "frozen" or "busy" (never idle); ``health`` a status; ``die_after``
so many requests the server is dead: 500 to all, health 503.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from autotune.engines import nullserver

PLAIN, DROP, DROP_LATE, HANG, ERROR_INSIDE, NO_DONE, NO_FINISH, NO_JSON, ABORTED, HTML = 1, *range(700, 709)

DEFAULTS: dict[str, Any] = {
    "token_s": 0.001,
    "gate": None,
    "lengths": None,
    "metrics": "on",
    "health": 200,
    "die_after": None,
}


def numbers_of(body: Mapping[str, Any]) -> list[int]:
    """Fault and number of a request; a plain one where the prompt is text."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    words = prompt.split() if isinstance(prompt, str) else prompt
    try:
        return [int(word) for word in words]
    except (TypeError, ValueError):
        return [PLAIN]


class FaultyAnswer(nullserver.Answer):
    connection: FaultyConnection

    def __init__(self, connection: FaultyConnection, body: Mapping[str, Any], *, fault: int, chat: bool) -> None:
        self.fault = fault
        super().__init__(connection, body, chat=chat)

    def step(self) -> bool:
        over = super().step() and self.fault != HANG
        half = self.written * 2 >= self.total
        if self.fault == DROP_LATE and half:
            self.connection.transport.abort()
        if self.fault == ERROR_INSIDE and half:
            self.total = self.written
            return True
        return over

    def write_token(self, *, last: bool) -> None:
        if self.fault == NO_JSON:
            self.connection.chunk(b"data: {broken\n\n")
        elif self.fault != HANG:
            finish = {NO_FINISH: None, ABORTED: "abort"}.get(self.fault, "length")
            self.connection.chunk(self.event(finish if last else None))

    def end(self) -> None:
        if self.fault == ERROR_INSIDE:
            error = b'{"error": {"message": "engine broke", "code": 500}}'
            self.say(b"data: " + error + b"\n\ndata: [DONE]\n\n" if self.stream else error)
        elif self.fault == NO_DONE and self.stream:
            self.connection.end_of_chunks()
        elif self.fault == NO_JSON and not self.stream:
            self.connection.answer(200, b"{broken")
        elif self.fault in (NO_FINISH, ABORTED) and not self.stream:
            finish = "abort" if self.fault == ABORTED else None
            self.say(json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": finish}]}).encode())
        else:
            super().end()

    def say(self, data: bytes) -> None:
        if self.stream:
            self.connection.chunk(data)
            self.connection.end_of_chunks()
        else:
            self.connection.answer(200, data)


class FaultyServer(nullserver.Server):
    def configure(self, config: Mapping[str, Any]) -> None:
        self.config = {**DEFAULTS, **config}
        self.seen: dict[str, Any] = {
            "most": 0,
            "arrived": [],
            "begun": 0,
            "ended": 0,
            "gone": 0,
            "bodies": [],
            "headers": {},
            "connections": 0,
            "in_flight": [],  # (time.monotonic(), requests here) at each change
        }

    def begin(self, answer: nullserver.Answer) -> None:
        lengths = self.config["lengths"]
        if lengths:
            answer.total = lengths[self.seen["begun"] % len(lengths)]
        self.seen["begun"] += 1
        super().begin(answer)
        self.note()

    def leave(self, answer: nullserver.Answer, how: str) -> None:
        if answer in self.active:
            self.seen[how] += 1
            super().leave(answer, how)
            self.note()

    def note(self) -> None:
        self.seen["most"] = max(self.seen["most"], len(self.active))
        self.seen["in_flight"].append((time.monotonic(), len(self.active)))

    def may_end(self, answer: nullserver.Answer) -> bool:
        gate = self.config["gate"]
        left = 0 if gate is None else gate["total"] - self.seen["ended"] - self.seen["gone"]
        return gate is None or len(self.active) == min(gate["concurrency"], left)

    def counters(self) -> dict[str, tuple[str, float]]:
        counters = super().counters()
        if self.config["metrics"] == "frozen":
            counters["generation_tokens_total"] = ("counter", 0)
        if self.config["metrics"] == "busy":
            counters["num_requests_running"] = ("gauge", len(self.active) + 1)
        return counters

    def metrics(self) -> bytes:
        return {"empty": b"", "broken": b"<html>not metrics {\n"}.get(self.config["metrics"], super().metrics())


class FaultyConnection(nullserver.Connection):
    server: FaultyServer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.seen["connections"] += 1

    def request(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        server, metrics = self.server, self.server.config["metrics"]
        if path == "/seen":
            told = {**server.seen, "active": len(server.active), "tokens": server.generation_tokens}
            self.answer(200, json.dumps(told).encode())
        elif path == "/health":
            self.answer(503 if self.dead() else server.config["health"], b"")
        elif path == "/metrics" and metrics == "slow":
            asyncio.get_running_loop().call_later(0.4, lambda: self.answer(200, server.metrics()))
        elif path == "/metrics" and metrics in ("hang", "off"):
            if metrics == "off":
                self.answer(404, b"{}")
        else:
            super().request(path, headers, body)

    def dead(self) -> bool:
        after = self.server.config["die_after"]
        return after is not None and len(self.server.seen["arrived"]) > after

    def complete(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        seen = self.server.seen
        seen["headers"] = headers = {**{name: value.lower() for name, value in headers.items()}, "path": path}
        if len(seen["bodies"]) < 50:
            seen["bodies"].append(body)
        fault, *rest = numbers_of(body)
        seen["arrived"].append(rest[0] if rest else fault)
        if self.dead() or fault in range(300, 600):
            error = {"message": f"no: {headers.get('authorization')} 'input': 'secret text'"}
            self.answer(500 if self.dead() else fault, json.dumps({"error": error}).encode())
        elif fault == HTML:
            self.answer(200, b"<html>not a completions server</html>")
        elif fault == DROP:
            self.transport.close()
        elif fault == PLAIN:
            super().complete(path, headers, body)
        else:
            self.start(FaultyAnswer(self, body, fault=fault, chat="chat" in path))


if __name__ == "__main__":
    given = nullserver.arguments()
    asyncio.run(nullserver.serve(FaultyServer(given.config), FaultyConnection, given.port))
