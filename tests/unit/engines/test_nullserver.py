"""The null server in this process, over real sockets; and as the process that ``started`` makes of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.engines import nullserver
from autotune.engines.nullserver import Connection, Server
from autotune.engines.scrape import parse

FAST = {"token_s": 0.002}


def raw(path: str, body: Mapping[str, Any] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def talk(*requests: bytes, config: Mapping[str, Any] = FAST, wanted: Callable[[bytes], bool]) -> tuple[bytes, Server]:
    """Send the requests over one connection; what comes back until ``wanted`` is met."""

    async def main() -> tuple[bytes, Server]:
        server = Server(config)
        listening = await asyncio.get_running_loop().create_server(lambda: Connection(server), "127.0.0.1")
        steps = asyncio.create_task(server.run())
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        for request in requests:
            writer.write(request)
            await writer.drain()
            await asyncio.sleep(0.01)
        got = b""
        async with asyncio.timeout(10):
            while not wanted(got):
                got += await reader.read(65536)
        writer.close()
        steps.cancel()
        listening.close()
        return got, server

    return asyncio.run(main())


def events(stream: bytes) -> list[Any]:
    lines = [line for line in stream.split(b"\r\n") if line.startswith(b"data: ")]
    return [json.loads(part[6:]) for line in lines for part in line.split(b"\n\n") if part and b"[DONE]" not in part]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_has_an_event_for_each_token(chat: bool) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, "stream": True}
    asked |= {"messages": [{"role": "user", "content": "a b c"}]} if chat else {"prompt": [5, 6, 7]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    got, server = talk(raw(path, asked), wanted=lambda got: got.endswith(b"0\r\n\r\n"))
    *tokens, usage = events(got)
    assert len(tokens) == 4
    texts = [(e["choices"][0].get("delta") or {}).get("content") or e["choices"][0].get("text") for e in tokens]
    assert texts == [nullserver.WORD] * 4
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, None, "length"]
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert got.count(b"data: [DONE]") == 1
    assert (server.generation_tokens, server.prompt_tokens, server.active) == (4, 3, {})


@pytest.mark.parametrize("token_s", [0.002, 0.0])
def test_an_answer_that_is_not_streamed_comes_whole(token_s: float) -> None:
    asked = {"prompt": "one two", "max_completion_tokens": 3}
    two = raw("/v1/completions", asked) + raw("/v1/chat/completions", {"messages": [], "max_tokens": 2})
    got, _ = talk(two, config={"token_s": token_s}, wanted=lambda got: got.count(b"total_tokens") == 2)
    first, second = sorted(
        (json.loads(part.split(b"\r\n\r\n")[1]) for part in got.split(b"HTTP/1.1 200 X")[1:]), key=str
    )
    by_kind = {answer["object"]: answer for answer in (first, second)}
    assert by_kind["text_completion"]["choices"][0]["text"] == nullserver.WORD * 3
    assert by_kind["text_completion"]["usage"]["prompt_tokens"] == 2
    assert by_kind["chat.completion"]["choices"][0]["message"]["content"] == nullserver.WORD * 2


def test_a_request_in_pieces_is_put_together() -> None:
    whole = raw("/v1/completions", {"prompt": "x", "max_tokens": 1})
    got, _ = talk(whole[:20], whole[20:90], whole[90:], wanted=lambda got: b"total_tokens" in got)
    assert b'"completion_tokens": 1' in got


def test_other_pages() -> None:
    asked = [raw("/metrics?x=1"), raw("/v1/models"), raw("/health"), raw("/nothing"), raw("/config", {"token_s": 3.0})]
    got, server = talk(*asked, wanted=lambda got: got.count(b"HTTP/1.1") == 5 and got.endswith(b"{}"))
    assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"404", b"200"]
    assert b"max_model_len" in got
    metrics = parse(got.split(b"\r\n\r\n")[1].decode())
    assert (metrics.running, metrics.waiting, metrics.generation_tokens_total, metrics.engines) == (0, 0, 0, 1)
    assert server.config["token_s"] == 3.0


def test_a_client_that_leaves_gives_its_answer_up() -> None:
    async def main() -> int:
        server = Server({"token_s": 0.001})
        listening = await asyncio.get_running_loop().create_server(lambda: Connection(server), "127.0.0.1")
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(raw("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 1_000_000}))
        await reader.readuntil(b"\r\n\r\n")
        before = len(server.active)
        writer.transport.abort()
        async with asyncio.timeout(10):
            while server.active:
                await asyncio.sleep(0.001)
        listening.close()
        return before

    assert asyncio.run(main()) == 1


def test_serve_prints_its_port_and_ends_with_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    printed, codes = io.StringIO(), []

    async def main() -> None:
        task = asyncio.create_task(nullserver.serve(Server({})))
        async with asyncio.timeout(10):
            while not printed.getvalue().endswith("\n"):
                await asyncio.sleep(0.001)
            os.write(writing, b"x")
            await asyncio.sleep(0.02)
            assert codes == []
            os.close(writing)
            while not codes:
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stdout", printed)
        monkeypatch.setattr(os, "_exit", codes.append)
        asyncio.run(main())
    assert int(printed.getvalue()) > 0
    assert set(codes) == {0}


def test_started_is_a_process_that_ends_with_the_block() -> None:
    with nullserver.started(config={"token_s": 0.001}) as url:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=10) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 2
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=2)


def test_another_program_may_be_started(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text("import sys; print(4711, flush=True); sys.stdin.read()")
    with nullserver.started(script=script) as url:
        assert url == "http://127.0.0.1:4711"


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["nullserver", "--port", "8123", "--config", '{"token_s": 0.5}'])
    given = nullserver.arguments()
    assert (given.port, given.config) == (8123, {"token_s": 0.5})
