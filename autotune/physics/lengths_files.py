"""Read answer lengths from what people have: our lengths.json, JSON, JSON lines, CSV or a list of numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.errors import InputError
from autotune.records import codec
from autotune.records.lengths import AnswerLength, Lengths

ANSWER_KEYS = ("output_tokens", "completion_tokens", "answer_tokens", "tokens", "output_len", "length")
PROMPT_KEYS = ("prompt_tokens", "input_tokens", "prompt_len", "input_len")
CUT_WORDS = ("length", "max_tokens", "cut", "truncated")
"""``finish_reason`` of an answer that was cut (OpenAI: ``length``)."""
NOT_ENDED = ("false", "0", "no", "")
SAME_LENGTH = 3
"""Without a finish reason, so many answers of exactly the greatest length were cut there."""


def parse_lengths(text: str, *, source: str, max_tokens: int | None = None) -> Lengths:
    """Lengths from the text of a file.

    Accepted: a ``lengths.json`` of a study; a JSON list of numbers or objects; an object of objects by id;
    the result file of ``vllm bench serve`` (``output_lens``, ``input_lens``); one JSON object or one number
    a line; CSV with a header. Objects and columns: ``output_tokens`` (or ``completion_tokens``), optional
    ``prompt_tokens``, optional ``finish_reason`` (``length``: cut) or ``ended``; also under ``usage``.

    Args:
        source: name of the file, for messages and the record.
        max_tokens: output limit under which the answers were written, if known.

    Raises:
        InputError: nothing of that kind, or a length that is no whole number of tokens.
    """
    stripped = text.strip().lstrip("\ufeff")
    if not stripped:
        raise InputError(f"{source}: no lengths in an empty file")
    data = _json(stripped)
    if isinstance(data, Mapping) and str(data.get("schema", "")).startswith("autotune/lengths/"):
        return _own(data, source)
    if isinstance(data, Mapping) and isinstance(data.get("output_lens"), list):
        prompts = data.get("input_lens") or []
        rows: list[Any] = [{"output_tokens": t} for t in data["output_lens"]]
        return _lengths(rows, source, max_tokens, prompts)
    if isinstance(data, Mapping):
        one = any(key in data for key in (*ANSWER_KEYS, "usage"))
        return _lengths([data] if one else list(data.values()), source, max_tokens)
    if isinstance(data, list):
        return _lengths(data, source, max_tokens)
    return _lengths(_lines(stripped, source), source, max_tokens)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _own(data: Mapping[str, Any], source: str) -> Lengths:
    try:
        return codec.decode(Lengths, data)
    except codec.RecordError as error:
        raise InputError(f"{source}: {error}") from error


def _lines(text: str, source: str) -> list[Any]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and lines[0].startswith("{"):
        rows = [_json(line) for line in lines]
        if any(not isinstance(row, Mapping) for row in rows):
            bad = next(i for i, row in enumerate(rows, 1) if not isinstance(row, Mapping))
            raise InputError(f"{source}, line {bad}: not a JSON object")
        return rows
    names = [name.strip().strip('"') for name in lines[0].split(",")] if lines else []
    if any(key in names for key in ANSWER_KEYS):
        return list(csv.DictReader(io.StringIO("\n".join(lines)), skipinitialspace=True))
    return [word for line in lines for word in line.replace(",", " ").split()]


def _lengths(rows: Sequence[Any], source: str, max_tokens: int | None, prompts: Iterable[Any] | None = None) -> Lengths:
    found: list[tuple[int, bool | None]] = []
    prompt_tokens = [_whole(p, source, i) for i, p in enumerate(prompts or (), 1)]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            found.append((_whole(row, source, number), None))
            continue
        usage = row.get("usage")
        flat = {**(usage if isinstance(usage, Mapping) else {}), **row}
        tokens = _first(flat, ANSWER_KEYS)
        if tokens is None:
            continue  # a question without an answer
        found.append((_whole(tokens, source, number), _ended(flat)))
        prompt = _first(flat, PROMPT_KEYS)
        if prompt is not None:
            prompt_tokens.append(_whole(prompt, source, number))
    if not found:
        raise InputError(
            f"{source}: no answer lengths",
            hint=f"one number a line, or JSON lines or CSV with one of {', '.join(ANSWER_KEYS[:3])}",
        )
    longest = max(tokens for tokens, _ in found)
    limit = max_tokens
    if limit is None and Counter(t for t, _ in found)[longest] >= SAME_LENGTH and longest > 1:
        limit = longest
    answers = tuple(
        AnswerLength(tokens=tokens, ended=ended if ended is not None else limit is None or tokens < limit)
        for tokens, ended in found
    )
    return Lengths(prompt_tokens=tuple(prompt_tokens), answers=answers, max_tokens=max_tokens or longest, source=source)


def _first(row: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) not in (None, "")), None)


def _ended(row: Mapping[str, Any]) -> bool | None:
    if row.get("ended") is not None:
        return str(row["ended"]).strip().lower() not in NOT_ENDED
    reason = row.get("finish_reason")
    return None if reason in (None, "") else str(reason).strip().lower() not in CUT_WORDS


def _whole(value: Any, source: str, number: int) -> int:
    try:
        tokens = float(value)
    except (TypeError, ValueError):
        tokens = math.nan
    if isinstance(value, bool) or not (tokens >= 0 and math.isfinite(tokens)):
        raise InputError(
            f"{source}, entry {number}: a length is a number of tokens, at least 0, got {value!r}",
            hint="one number a line, or JSON lines or CSV with a column output_tokens",
        )
    return round(tokens)
