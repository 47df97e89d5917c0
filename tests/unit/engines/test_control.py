"""Control calls over canned answers: what is read, and that every odd answer becomes None or ControlError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from autotune.engines.control import Control, ControlError, ServedModel, api_key
from autotune.records.load import Message

Answer = Callable[[httpx.Request], httpx.Response]


def control(answer: Answer, **more: Any) -> Control:
    return Control("http://127.0.0.1:1/", transport=httpx.MockTransport(answer), **more)


def says(*, status: int = 200, data: Any = None, text: str | None = None) -> Answer:
    return lambda request: httpx.Response(status, text=json.dumps(data) if text is None else text)


def nobody(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def slow(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("late", request=request)


ODD = [nobody, slow, says(status=500, data={}), says(text="<html>"), says(data=[1])]


@pytest.mark.parametrize(("answer", "status"), [(says(), 200), (says(status=503), 503), (nobody, None), (slow, None)])
def test_health(answer: Answer, status: int | None) -> None:
    with control(answer) as calls:
        assert calls.health() == status


def test_models_without_adapters_and_odd_entries() -> None:
    data = {
        "data": [
            {"id": "base", "parent": None, "max_model_len": 4096},
            {"id": "adapter", "parent": "base"},
            {"id": "old", "max_model_len": True},
            {"id": 3},
            "text",
        ]
    }
    with control(says(data=data)) as calls:
        assert calls.models() == (
            ServedModel(name="base", max_model_len=4096),
            ServedModel(name="old", max_model_len=None),
        )


@pytest.mark.parametrize("answer", [*ODD, says(data={"data": 3})])
def test_models_of_no_openai_server(answer: Answer) -> None:
    with control(answer) as calls, pytest.raises(ControlError, match="/v1/models"):
        calls.models()


def test_version() -> None:
    with control(says(data={"version": "0.33.0"})) as calls:
        assert calls.version() == "0.33.0"


@pytest.mark.parametrize("answer", [*ODD, says(data={"version": 3})])
def test_a_version_that_is_not_said(answer: Answer) -> None:
    with control(answer) as calls:
        assert calls.version() is None


def test_server_info_is_asked_as_json() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["config_format"] == "json"
        return httpx.Response(200, json={"vllm_config": {"scheduler_config": {"max_num_seqs": 7}}})

    with control(answer) as calls:
        info = calls.server_info()
    assert info == {"scheduler_config": {"max_num_seqs": 7}}


@pytest.mark.parametrize("answer", [*ODD, says(status=404, data={}), says(data={"vllm_config": "as text"})])
def test_server_info_without_dev_mode(answer: Answer) -> None:
    with control(answer) as calls:
        assert calls.server_info() is None


def test_metrics_as_they_are() -> None:
    with control(says(text="vllm:x 1\n")) as calls:
        assert calls.metrics() == "vllm:x 1\n"


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        (says(data={"success": True}), True),
        (says(data={"success": False}), False),
        (says(text=""), True),
        (says(data=[]), True),
        (says(status=404, data={}), False),
        (nobody, False),
    ],
)
def test_reset_of_the_prefix_cache_in_all_versions(answer: Answer, done: bool) -> None:
    with control(answer) as calls:
        assert calls.reset_prefix_cache() is done


def test_tokenize_messages_and_text() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"count": 2, "tokens": [5, 6]})

    with control(answer) as calls:
        messages = (Message(role="user", content="hi"),)
        assert calls.tokenize("m", messages=messages, chat_template_kwargs={"enable_thinking": False}) == (5, 6)
        assert calls.tokenize("m", messages=messages) == (5, 6)
        assert calls.tokenize("m", prompt="hi") == (5, 6)
    asked = [{"role": "user", "content": "hi"}]
    assert bodies == [
        {"model": "m", "messages": asked, "chat_template_kwargs": {"enable_thinking": False}},
        {"model": "m", "messages": asked},
        {"model": "m", "prompt": "hi"},
    ]


def test_tokenize_without_tokens() -> None:
    with control(says(data={"count": 2})) as calls, pytest.raises(ControlError, match="tokenize"):
        calls.tokenize("m", prompt="hi")


def test_generate_is_a_forced_request() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (body["max_tokens"], body["ignore_eos"], body["model"]) == (2, True, "m")
        return httpx.Response(200, json={"choices": [{"text": "a b"}]})

    with control(answer) as calls:
        calls.generate("m", tokens=2, limit_s=1)


@pytest.mark.parametrize(
    ("answer", "status"),
    [(says(status=500, data={}), 500), (says(data={"error": {"message": "no"}}), None), (nobody, None), (slow, None)],
)
def test_generate_fails(answer: Answer, status: int | None) -> None:
    with control(answer) as calls, pytest.raises(ControlError, match="/v1/completions") as caught:
        calls.generate("m", tokens=2, limit_s=1)
    assert caught.value.status == status


def test_the_key_is_sent_and_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200)

    for key in (api_key({"VLLM_API_KEY": "k"}), api_key({"VLLM_API_KEY": ""})):
        with control(answer, api_key=key) as calls:
            calls.health()
    assert seen == ["Bearer k", None]
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    assert api_key() == "mine"
