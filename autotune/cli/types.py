"""Parameter types and option groups that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """``90s``, ``30m``, ``2h``, ``1h30m``, ``50ms`` or plain seconds -> seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, (int, float)):
            return float(value)
        text = str(value).strip().lower()
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd])", text)
        if re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = float(text)
        elif parts and "".join(number + unit for number, unit in parts) == text:
            seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
        else:
            self.fail(f"{value!r} is no duration: write 90s, 30m, 2h or 1h30m", param, ctx)
        if seconds <= 0:
            self.fail(f"a duration is above 0, got {value!r}", param, ctx)
        return seconds


class KeyValue(click.ParamType[tuple[str, Any]]):
    """``name=value`` with a JSON value, or plain text where it is no JSON."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Name with underscores and the parsed value."""
        if isinstance(value, tuple):
            return value
        key, separator, text = str(value).partition("=")
        if not separator or not key.strip():
            self.fail(f"{value!r} is not of the form name=value", param, ctx)
        return key.strip().lstrip("-").replace("-", "_"), json_or_text(text.strip())


def json_or_text(text: str) -> Any:
    """``8`` -> 8, ``true`` -> True, ``fp8`` -> "fp8"; NaN and infinity stay text."""
    try:
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return text


def studies_option(function: F) -> F:
    """``--studies DIR``."""
    return click.option(
        "--studies",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("studies"),
        show_default=True,
        help="Folder that holds the studies.",
    )(function)


def workload_params(function: F) -> F:
    """Which questions, and how they are asked."""
    for decorate in (
        click.option("--limit", type=click.IntRange(min=1), help="A seeded, stratified sample of so many questions."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Output limit of each answer. [default: 14336]"),
        click.option("--official-prompt", is_flag=True, default=None, help="hle: one system prompt for all."),
        click.option("--dataset-path", help="hle: local folder of the data set (parquet), without a network."),
        click.option(
            "--workload", help="hle, synthetic, or a JSONL file, one question a line ('-': stdin). [default: hle]"
        ),
    ):
        function = decorate(function)
    return function


def lengths_params(function: F) -> F:
    """How long answers are, or how that is found out."""
    for decorate in (
        click.option("--probe-time", type=Duration(), help="The probe ends after so long, and counts. [default: 5m]"),
        click.option(
            "--probe-limit",
            type=click.IntRange(min=0),
            help="Answers to probe lengths with where none are known; 0: none, loads start fresh. [default: 128]",
        ),
        click.option("--lengths", help="Answer lengths: a file (lengths.json, JSON lines, CSV), or hle-reasoning."),
    ):
        function = decorate(function)
    return function


def latency_params(function: F) -> F:
    """Limits of latency: answers are streamed only where there is one."""
    for decorate in (
        click.option("--max-tpot", type=Duration(), help="Time per output token, 99th percentile: 50ms."),
        click.option("--max-ttft", type=Duration(), help="Time to the first token, 99th percentile: 2s."),
    ):
        function = decorate(function)
    return function


def server_params(function: F) -> F:
    """Which server answers."""
    for decorate in (
        click.option(
            "--vllm-command", help="Template with {args} {host} {port} {name} {devices}. [default: vllm serve]"
        ),
        click.option("--devices", help="GPU indices to use: 0,1. [default: all that are visible]"),
        click.option("--gpus", help="Hardware in words, 8xH200: describes it, does not select."),
        click.option(
            "--real-time",
            type=click.FloatRange(min=0),
            help="sim: real seconds that a simulated one takes. [default: 0]",
        ),
        click.option("--engine", type=click.Choice(["vllm", "sim"]), help="Real vLLM, or the built-in simulator."),
        click.option("--model", help="Hub name or folder of the model."),
    ):
        function = decorate(function)
    return function
