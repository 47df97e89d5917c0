from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines.driver import Target
from autotune.engines.driver.wire import (
    LONGEST_MESSAGE,
    StreamReader,
    body_of,
    error_of_status,
    read_answer,
    shorten,
)
from autotune.errors import InputError
from autotune.records.load import LoadPlan, Message, Request

IDS = Request(id="a", prompt=(1, 2, 3), max_tokens=7)
CHAT = Request(id="b", messages=(Message(role="user", content="héllo"),), max_tokens=9)
TARGET = Target(base_url="http://h:8000/v1/", model="m")


def body(request: Request, **load: Any) -> tuple[str, dict[str, Any]]:
    url, raw = body_of(request, TARGET, LoadPlan(start=(request,), **load))
    return url, json.loads(raw)


def test_token_ids_go_to_completions_without_sampling() -> None:
    url, data = body(IDS)
    assert url == "http://h:8000/v1/completions"
    assert data == {"model": "m", "max_tokens": 7, "prompt": [1, 2, 3]}


def test_messages_go_to_chat_with_the_template_arguments() -> None:
    url, data = body(CHAT, chat_template_kwargs={"enable_thinking": True})
    assert url == "http://h:8000/v1/chat/completions"
    assert data == {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "héllo"}],
        "chat_template_kwargs": {"enable_thinking": True},
    }


def test_template_arguments_are_for_chat_alone() -> None:
    assert "chat_template_kwargs" not in body(CHAT)[1]
    assert "chat_template_kwargs" not in body(IDS, chat_template_kwargs={"enable_thinking": True})[1]


def test_a_forced_length_is_ignore_eos_alone() -> None:
    _, data = body(Request(id="a", prompt=(1,), max_tokens=7, forced=True, salt="s"))
    assert data["ignore_eos"] is True
    assert data["cache_salt"] == "s"
    assert "min_tokens" not in data


def test_sampling_and_streaming_are_sent_when_the_plan_has_them() -> None:
    _, data = body(IDS, sampling={"temperature": 0.6, "top_k": 20.0}, stream=True)
    assert data["temperature"] == 0.6
    assert repr(data["top_k"]) == "20"
    assert data["stream"] is True
    assert data["stream_options"] == {"include_usage": True}


def test_a_target_needs_an_address_and_hides_its_key() -> None:
    with pytest.raises(InputError, match="localhost:8000"):
        Target(base_url="localhost:8000", model="m")
    target = Target(base_url="http://h", model="m", api_key="sk-secret")
    assert "sk-secret" not in repr(target)
    assert target.headers()["Authorization"] == "Bearer sk-secret"
    assert "Authorization" not in TARGET.headers()


def answer(**changes: Any) -> bytes:
    data = {
        "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    return json.dumps({**data, **changes}).encode()


def test_a_whole_answer() -> None:
    read = read_answer(answer(), keep_text=True)
    assert (read.prompt_tokens, read.output_tokens, read.finish_reason) == (3, 2, "stop")
    assert (read.text, read.error) == ("hi", None)
    assert read_answer(answer(), keep_text=False).text is None


def test_a_chat_answer_with_and_without_content() -> None:
    choice = {"message": {"role": "assistant", "content": "yes", "reasoning": "hm"}, "finish_reason": "length"}
    read = read_answer(answer(choices=[choice]), keep_text=True)
    assert (read.text, read.finish_reason) == ("yes", "length")
    cut = {"message": {"role": "assistant", "content": None, "reasoning": "hm"}, "finish_reason": "length"}
    assert read_answer(answer(choices=[cut]), keep_text=True).text == ""


def test_an_answer_without_usage_has_unknown_lengths() -> None:
    read = read_answer(answer(usage=None), keep_text=False)
    assert (read.prompt_tokens, read.output_tokens, read.error) == (None, None, None)


@pytest.mark.parametrize(
    ("raw", "kind", "text"),
    [
        (b"<html>", "incomplete", "no JSON"),
        (b"[1]", "incomplete", "no JSON object"),
        (b"{}", "incomplete", "finish_reason"),
        (answer(choices=[]), "incomplete", "finish_reason"),
        (answer(choices=[{"text": "x", "finish_reason": None}]), "incomplete", "finish_reason"),
        (answer(choices=[{"text": "x", "finish_reason": "abort"}]), "server", "abort"),
        (b'{"error": {"message": "EngineCore died", "code": 500}}', "server", "EngineCore died"),
        (b'{"object": "error", "message": "old style"}', "server", "old style"),
    ],
)
def test_an_answer_that_is_none(raw: bytes, kind: str, text: str) -> None:
    error = read_answer(raw, keep_text=True).error
    assert error is not None
    assert error.kind == kind
    assert text in error.message


@pytest.mark.parametrize(
    ("status", "raw", "kind", "text"),
    [
        (400, b'{"error": {"message": "too long"}}', "client", "400: too long"),
        (404, b'{"detail": "Not Found"}', "client", "404: Not Found"),
        (302, b"", "client", "302:"),
        (422, b'{"detail": [{"loc": ["body"], "input": {"prompt": "secret question"}}]}', "client", '"loc"'),
        (500, b"Internal Server Error", "server", "500: Internal Server Error"),
        (503, b'{"message": null, "x": 1}', "server", "503: no message"),
    ],
)
def test_the_error_of_a_status(status: int, raw: bytes, kind: str, text: str) -> None:
    error = error_of_status(status, raw)
    assert error.kind == kind
    assert text in error.message
    assert "secret question" not in error.message


def test_messages_are_short_and_on_one_line() -> None:
    assert shorten("a\n  b\tc") == "a b c"
    assert len(shorten("x" * 5000)) == LONGEST_MESSAGE
    assert shorten("2 errors: {'type': 'int', 'input': 'the question'}, more") == "2 errors: {'type': 'int',"


def events(*data: Any) -> bytes:
    return b"".join(
        b"data: " + (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\r\n\r\n" for item in data
    )


def chunk(text: str = "", finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
STREAM = events(chunk(role="assistant"), chunk("a"), chunk("b"), chunk("ç", "stop"), USAGE, b"[DONE]")


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = StreamReader(keep_text=True)
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        reader.feed(STREAM[a:b], float(i))
    read = reader.answer()
    assert (read.text, read.output_tokens, read.finish_reason, read.error) == ("abç", 3, "stop", None)
    assert reader.chunks == 3


def test_the_first_chunk_is_the_first_with_something_in_it() -> None:
    reader = StreamReader(keep_text=False)
    reader.feed(events(chunk(role="assistant")), 1.0)
    assert reader.first_s is None
    reader.feed(b": ping\n" + events(chunk(reasoning="hm"), chunk(reasoning_content="hm")), 2.0)
    reader.feed(events(chunk("a", "stop"), USAGE, b"[DONE]"), 5.0)
    assert (reader.first_s, reader.last_s, reader.chunks) == (2.0, 5.0, 3)


@pytest.mark.parametrize(
    ("raw", "kind", "text"),
    [
        (events(chunk("a"), {"error": {"message": "boom"}}, b"[DONE]"), "server", "boom"),
        (events(chunk("a", "stop"), USAGE), "incomplete", "[DONE]"),
        (events(chunk("a"), USAGE, b"[DONE]"), "incomplete", "finish_reason"),
        (events(chunk("a"), b"{broken", b"[DONE]"), "incomplete", "no JSON"),
        (b"", "incomplete", "finish_reason"),
    ],
)
def test_a_stream_without_a_good_end_is_a_failure(raw: bytes, kind: str, text: str) -> None:
    reader = StreamReader(keep_text=False)
    reader.feed(raw, 0.0)
    error = reader.answer().error
    assert error is not None
    assert error.kind == kind
    assert text in error.message
