"""Logs and pages of real servers, read in place where they are there (``AUTOTUNE_FIELD``), against their right "
"values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.engines.scrape import page_kind, parse
from autotune.engines.serverlog import LogReader
from autotune.records.codec import encode

FIELD = Path(os.environ.get("AUTOTUNE_FIELD", Path(autotune.__file__).parents[2] / "shared" / "field"))
ANSWERS = FIELD / "expected.json"
HEADER_END = b"# ---- log text below"
EXPECTED: dict[str, Any] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
JUDGED = {(case["file"], case["field"]): case["also"] for case in EXPECTED.get("judgement", ())}
LOGS = sorted(name for name in EXPECTED if name.startswith("logs/"))
PAGES = sorted(name for name in EXPECTED if name.startswith("metrics/"))

pytestmark = pytest.mark.skipif(not EXPECTED, reason="no field material here")


def log_text(name: str) -> bytes:
    whole = (FIELD / name).read_bytes()
    _, found, text = whole.partition(HEADER_END)
    return text.partition(b"\n")[2] if found else whole


def read(name: str, chunk: int) -> dict[str, Any]:
    text = log_text(name)
    reader = LogReader()
    for start in range(0, len(text), chunk):
        reader.feed(text[start : start + chunk])
    reader.close()
    data: dict[str, Any] = encode(reader.summary(name))
    return data


def same(got: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return isinstance(got, dict) and all(same(got[key], value) for key, value in right.items())
    if isinstance(right, float):
        return isinstance(got, (int, float)) and abs(got - right) < 1e-6
    return bool(got == right)


def check(name: str, got: dict[str, Any]) -> None:
    for key, right in EXPECTED[name].items():
        value = got[key]["kind"] if key == "failure" and got[key] is not None else got[key]
        answers = [right, *JUDGED.get((name, key), ())]
        assert any(same(value, answer) for answer in answers), f"{name} {key}: {value!r} is none of {answers!r}"


@pytest.mark.parametrize("chunk", [1 << 20, 61])
@pytest.mark.parametrize("name", LOGS)
def test_log(name: str, chunk: int) -> None:
    got = read(name, chunk)
    if EXPECTED[name]["samples"] == 0:
        got["engines"] = EXPECTED[name]["engines"]
    check(name, got)
    failure = got["failure"]
    if failure is not None:
        assert failure["hint"]
        assert failure["line"].encode()[:60] in log_text(name)


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str) -> None:
    text = (FIELD / name).read_bytes().decode("utf-8", "replace")
    check(name, encode(parse(text)))
    assert page_kind(text) == ("vllm" if text else "empty")
