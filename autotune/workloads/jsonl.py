"""A workload from a file of JSON lines: one question an object, ``prompt`` or ``messages``."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import InputError
from autotune.records.load import Message
from autotune.records.trial import WorkloadSpec
from autotune.workloads.base import Question, Source

KEYS = ("prompt", "messages", "id", "category", "max_tokens", "answer")
ROLES = ("system", "developer", "user", "assistant")
SHAPE = 'a line looks like {"id": "q1", "category": "history", "prompt": "When ...?", "answer": "1848"}'


class _LineError(ValueError):
    """A rule that a line breaks, in words."""

    def __init__(self, rule: str, hint: str = SHAPE) -> None:
        super().__init__(rule)
        self.hint = hint


def read(spec: WorkloadSpec) -> Source:
    """Read ``spec.path``; ``-`` is stdin, read once in a process.

    Keys: ``prompt`` (text, one user message) or ``messages`` (role and content; content parts of type text
    are joined); optional ``id`` (text or whole number), ``category``, ``max_tokens``, ``answer``. A line
    without id is named after its content, so that it keeps its name when the file grows. Other keys are
    ignored and named in a note.

    Raises:
        InputError: names file, line, rule and value, with a hint.
    """
    if spec.path is None:
        raise InputError("workload jsonl: a file is needed", hint="--workload FILE.jsonl, or --workload - for stdin")
    name = "stdin" if spec.path == "-" else spec.path
    content = _stdin() if spec.path == "-" else _file(spec.path)
    questions: dict[str, tuple[int, Question]] = {}
    unnamed: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            data = _object(raw)
            question = _question(data, unnamed)
        except _LineError as error:
            raise InputError(f"{name}, line {number}: {error}", hint=error.hint) from None
        ignored.update(key for key in data if key not in KEYS)
        if question.id in questions:
            raise InputError(
                f"{name}, line {number}: id {_short(question.id)} is already used in line {questions[question.id][0]}",
                hint="answers are kept by id: give each question its own, or leave ids out",
            )
        questions[question.id] = (number, question)
    if not questions:
        raise InputError(f"{name} holds no question", hint=SHAPE)
    keys = ", ".join(_short(key) for key in sorted(ignored)[:8])
    return Source(
        questions=tuple(question for _, question in questions.values()),
        provenance={"source": name, "revision": f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"},
        notes=(f"{name}: keys that mean nothing here: {keys}",) if ignored else (),
    )


@functools.cache
def _stdin() -> bytes:
    return sys.stdin.buffer.read()


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"workload file {_short(path)} cannot be read: {why}",
            hint="--workload FILE.jsonl, or --workload - for stdin",
        ) from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _LineError(
            f"not UTF-8 text (byte {error.start + 1}, 0x{raw[error.start]:02x})",
            "save the file as UTF-8, uncompressed: iconv -f utf-16 -t utf-8 OLD > NEW.jsonl",
        ) from None
    try:
        data = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise _LineError(
            f"not JSON: {error.msg} at column {error.colno}, got {_short(text.strip())}", _why(text)
        ) from None
    except RecursionError:
        raise _LineError("not a question: nested too deeply") from None
    except ValueError as error:
        raise _LineError(f"not JSON that can be read: {error}") from None
    if not isinstance(data, dict):
        raise _LineError(f"a line is one JSON object, got {_short(data)}", _why(text))
    return data


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _why(text: str) -> str:
    """A hint for the usual mistake: one big array, or an object over several lines."""
    if text.lstrip().startswith("["):
        return "the file is one JSON array: jq -c '.[]' OLD.json > NEW.jsonl makes one object a line"
    if text.strip() == "{":
        return "the file is indented: jq -c . OLD.json > NEW.jsonl makes one object a line"
    return SHAPE


def _question(data: Mapping[str, Any], unnamed: Counter[str]) -> Question:
    if ("prompt" in data) == ("messages" in data):
        both = "prompt" in data
        raise _LineError(f"exactly one of prompt and messages is needed, got {'both' if both else 'neither'}")
    messages = (
        (Message(role="user", content=_text(data["prompt"], "prompt")),)
        if "prompt" in data
        else _messages(data["messages"])
    )
    max_tokens = data.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise _LineError(f"max_tokens is a whole number of at least 1, got {_short(max_tokens)}")
    category, answer = data.get("category"), data.get("answer")
    return Question(
        id=_id(data["id"]) if data.get("id") is not None else _name(messages, unnamed),
        messages=messages,
        category=None if category is None else _text(category, "category"),
        max_tokens=max_tokens,
        answer=str(answer) if type(answer) in (int, float) else None if answer is None else _text(answer, "answer"),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _LineError(f"messages is a list of at least one message, got {_short(value)}")
    messages = []
    for index, item in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(item, dict):
            raise _LineError(f"{place} is an object with role and content, got {_short(item)}")
        role = item.get("role")
        if role not in ROLES:
            raise _LineError(f"{place}.role is one of {', '.join(ROLES)}, got {_short(role)}")
        messages.append(Message(role=role, content=_content(item.get("content"), f"{place}.content")))
    return tuple(messages)


def _content(value: Any, place: str) -> str:
    if not isinstance(value, list):
        return _text(value, place)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _LineError(f"{place}[{index}] is a part with a type, got {_short(part)}")
        if part["type"] != "text":
            raise _LineError(
                f"{place}[{index}] is of type {_short(part['type'])}: only text can be asked",
                "leave out the questions with images or audio",
            )
        texts.append(_text(part.get("text"), f"{place}[{index}].text"))
    # Joined as vLLM joins text parts for a chat template that takes plain text.
    return _text("\n".join(texts), place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _LineError(f"{place} is text that is not empty, got {_short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _LineError(f"{place} holds half a surrogate pair, which is no text, got {_short(value)}") from None
    return value


def _id(value: Any) -> str:
    return str(value) if type(value) is int else _text(value, "id")


def _name(messages: tuple[Message, ...], unnamed: Counter[str]) -> str:
    """``q-`` and twelve digits of the content's hash; ``-2`` for the second of the same content."""
    text = "\0".join(f"{m.role}\0{m.content}" for m in messages)
    name = f"q-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    unnamed[name] += 1
    return name if unnamed[name] == 1 else f"{name}-{unnamed[name]}"


def _short(value: Any) -> str:
    """The value as JSON (surrogates escaped), cut to what fits a line."""
    text = json.dumps(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
