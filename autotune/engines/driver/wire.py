"""Bodies of completion requests, and how answers are read: whole, streamed, or an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from autotune.engines.driver.target import Target
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import ErrorKind, RequestError

LONGEST_MESSAGE = 300
"""Characters of an error that are kept."""

_INPUT_ECHO = re.compile(r"""['"]input['"]\s*:.*""", re.DOTALL)
"""vLLM's validation errors repeat the body of the request: neither prompts nor answers belong in records."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an answer says of itself; ``error`` where it is none."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    text: str | None = None
    error: RequestError | None = None


def body_of(request: Request, target: Target, load: LoadPlan) -> tuple[str, bytes]:
    """Address and JSON body of one request.

    Token ids go to ``/v1/completions`` as they are, messages to ``/v1/chat/completions``. A forced length
    is ``ignore_eos`` alone: ``min_tokens`` adds a logits processor to every step, so it would change the
    speed that is measured. No sampling parameter is sent unless the plan has some, so that the server's
    generation_config applies.
    """
    data: dict[str, object] = {"model": target.model, "max_tokens": request.max_tokens}
    if request.messages is not None:
        route = "chat/completions"
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        data["messages"] = messages
        if load.chat_template_kwargs:
            data["chat_template_kwargs"] = dict(load.chat_template_kwargs)
    else:
        route = "completions"
        data["prompt"] = request.prompt
    if load.stream:
        data["stream"] = True
        data["stream_options"] = {"include_usage": True}
    if request.forced:
        data["ignore_eos"] = True
    if request.salt is not None:
        data["cache_salt"] = request.salt
    for name, value in (load.sampling or {}).items():
        # top_k and seed are whole numbers for the server; records hold floats.
        data[name] = int(value) if float(value).is_integer() else value
    return target.url(route), orjson.dumps(data)


def read_answer(raw: bytes, *, keep_text: bool) -> Answer:
    """The answer of a request that was not streamed (status 200)."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _bad("incomplete", "status 200, but no JSON")
    reader = StreamReader(keep_text=keep_text)
    reader.take(data, 0.0)
    reader.done = True
    return reader.answer()


def error_of_status(status: int, raw: bytes) -> RequestError:
    """The error of an answer whose status is not 200."""
    try:
        message = _message(orjson.loads(raw))
    except orjson.JSONDecodeError:
        message = raw.decode("utf-8", "replace")
    kind: ErrorKind = "client" if 300 <= status < 500 else "server"
    return RequestError(kind=kind, message=shorten(f"{status}: {message}"))


def shorten(message: str) -> str:
    """One line without the request's own text, at most 300 characters."""
    line = " ".join(_INPUT_ECHO.sub("", message).split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."


class StreamReader:
    """Reads an answer as server-sent events; ``take`` reads one chunk, or a whole answer."""

    def __init__(self, *, keep_text: bool) -> None:
        self.first_s: float | None = None
        """Arrival of the first chunk with something written in it."""
        self.last_s = 0.0
        self.chunks = 0
        """Chunks with something written in them."""
        self.done = False
        """The end of the stream was said (``[DONE]``)."""
        self._rest = b""
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._error: RequestError | None = None
        self._text: list[str] | None = [] if keep_text else None

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes of the stream, as they arrive."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                continue
            try:
                self.take(orjson.loads(payload), now_s)
            except orjson.JSONDecodeError:
                self._error = self._error or _error("incomplete", "a chunk that is no JSON")

    def take(self, data: Any, now_s: float) -> None:
        """One chunk, parsed."""
        if not isinstance(data, dict):
            self._error = self._error or _error("incomplete", "no JSON object")
            return
        if data.get("error") or data.get("object") == "error":
            self._error = self._error or _error("server", _message(data))
            return
        usage = data.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        self._finish = choice.get("finish_reason") or self._finish
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("content") or part.get("text")
        if text or part.get("reasoning") or part.get("reasoning_content") or self._finish is not None:
            if self.first_s is None:
                self.first_s = now_s
            self.last_s = now_s
            self.chunks += 1
        if text and self._text is not None:
            self._text.append(text)

    def answer(self) -> Answer:
        """What was read, once the connection has nothing more."""
        if self._error is not None:
            return Answer(error=self._error)
        if self._finish is None:
            return _bad("incomplete", "the answer has no finish_reason")
        if self._finish in ("abort", "error"):
            return _bad("server", f"the server ended the answer: finish_reason {self._finish}")
        if not self.done:
            return _bad("incomplete", "the stream ended without [DONE]")
        return Answer(
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            output_tokens=_count(self._usage.get("completion_tokens")),
            finish_reason=str(self._finish),
            text=None if self._text is None else "".join(self._text),
        )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _message(data: object) -> str:
    """The text of an error object: ``{"error": {"message"}}``, ``{"message"}``, ``{"detail"}``, a string."""
    if isinstance(data, dict):
        inner = data.get("error") or data.get("message") or data.get("detail")
        return _message(inner) if inner is not None else "no message"
    return data if isinstance(data, str) else orjson.dumps(data).decode()


def _error(kind: ErrorKind, message: str) -> RequestError:
    return RequestError(kind=kind, message=shorten(message))


def _bad(kind: ErrorKind, message: str) -> Answer:
    return Answer(error=_error(kind, message))
