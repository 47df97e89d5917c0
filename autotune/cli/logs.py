"""``autotune log`` and ``autotune scrape``: what a server said and says, without a study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import click

from autotune.cli.types import Duration
from autotune.engines.logsummary import LastStats, LogSummary
from autotune.engines.scrape import Metrics, Reading, fetch, looks_like_url, page_kind, parse, poll
from autotune.engines.serverlog import read_log
from autotune.errors import InputError, PrerequisiteError
from autotune.records.codec import dumps, encode


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="A list with one object a file.")
def log(files: tuple[Path, ...], as_json: bool) -> None:
    """What the log of a vLLM server says: load, KV cache, and what ended it.

    Any version from V0 to 0.33, as printed or through docker, journald, kubectl, Slurm or Ray.

    \b
    autotune log server.log
    autotune log studies/*/attempts/*/server.log --json
    """
    summaries = [read_log(file) for file in files]
    for summary in summaries:
        if summary.samples == 0 and summary.vllm_version is None and summary.failure is None:
            click.echo(f"note: {summary.file} holds no line of vLLM that says anything", err=True)
    click.echo(dumps(summaries, indent=2) if as_json else "\n\n".join(map(_log_text, summaries)))


@click.command()
@click.argument("source", metavar="FILE_OR_URL")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (with --every: one a line).")
@click.option("--every", "every_s", type=Duration(), help="Read again and again, until interrupted: 1s, 30s, 5m.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many readings.")
@click.option("--write", "file", type=click.Path(path_type=Path), help="Append one JSON object a reading to FILE.")
@click.option("--timeout", "timeout_s", type=Duration(), default="10s", show_default=True, help="Longest wait.")
def scrape(
    source: str, as_json: bool, every_s: float | None, count: int | None, file: Path | None, timeout_s: float
) -> None:
    """What the /metrics page of a vLLM server says, from the server or from a saved page.

    FILE_OR_URL is a file, or an address: localhost:8000, http://host:8000/v1, http://host:8000/metrics.

    \b
    autotune scrape localhost:8000
    autotune scrape localhost:8000 --every 5s --write load.jsonl
    """
    read = _reader(source, timeout_s)
    page = read()
    _check_page(page, source)
    if every_s is None and file is None and count is None:
        metrics = parse(page)
        click.echo(dumps(metrics, indent=2) if as_json else _metrics_text(metrics))
        return
    readings = poll(read, every_s=every_s or 1.0, count=count or (None if every_s else 1))
    if file is None:
        _follow(readings, lambda reading: click.echo(_line(reading) if as_json else _reading_text(reading)))
    else:
        _follow_into(readings, file)


def _reader(source: str, timeout_s: float) -> Callable[[], str]:
    """How to get the page: from a file where there is one of that name, else from a server."""
    path = Path(source)
    if not path.exists() and looks_like_url(source):
        return lambda: fetch(source, timeout_s)

    def read_file() -> str:
        try:
            return path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise InputError(
                f"cannot read {source}: {error.strerror or error}",
                hint="give a saved page, or an address such as http://localhost:8000",
            ) from error

    return read_file


def _check_page(page: str, source: str) -> None:
    kind = page_kind(page)
    if kind == "other":
        raise InputError(
            f"{source} is not a vLLM server's page: it names no vllm: metric",
            hint="check the port; a vLLM server started with --disable-log-stats has none either",
        )
    if kind == "empty":
        click.echo(f"note: {source} holds no metrics at all: nothing is known", err=True)


def _follow(readings: Iterable[Reading], tell: Callable[[Reading], None]) -> int:
    """Tell each reading until they end or the user has seen enough."""
    done = 0
    try:
        for reading in readings:
            tell(reading)
            done += 1
            if reading.error is not None:
                click.echo(f"note: {reading.error}", err=True)
    except KeyboardInterrupt:
        click.echo("", err=True)
    return done


def _follow_into(readings: Iterable[Reading], path: Path) -> None:
    try:
        with path.open("a", encoding="utf-8") as out:
            done = _follow(readings, lambda reading: _append(out, reading))
    except OSError as error:
        raise PrerequisiteError(
            f"cannot write {path}: {error.strerror or error}", hint="--write needs a file in a folder that exists"
        ) from error
    click.echo(f"{done} readings appended to {path}", err=True)


def _append(out: TextIO, reading: Reading) -> None:
    out.write(_line(reading) + "\n")
    out.flush()


def _line(reading: Reading) -> str:
    """One JSON object: the metrics and the unix time ``t``; all of them null, with ``error``, where there are none."""
    data: dict[str, Any] = encode(parse("") if reading.metrics is None else reading.metrics)
    data = {"schema": data.pop("schema"), "t": round(reading.t, 3), **data}
    return dumps(data if reading.error is None else {**data, "error": reading.error})


def _log_text(summary: LogSummary) -> str:
    lines = [
        summary.file,
        f"  vLLM        {summary.vllm_version or '?'}, {summary.samples} stats lines{_engines_text(summary.engines)}",
        f"  KV cache    {_number(summary.kv_capacity_tokens, 'tokens')}",
    ]
    if summary.last is not None:
        lines += [
            f"  last        {_last_text(summary.last)}",
            f"  peak        {_number(summary.peak_output_tokens_per_s, 'tokens/s')}, "
            f"KV use up to {_percent(summary.max_kv_usage)}",
        ]
    failure = summary.failure
    if failure is None:
        return "\n".join([*lines, "  failure     none"])
    lines += [f"  failure     {failure.kind}: {failure.line}", f"  hint        {failure.hint}"]
    return "\n".join(lines)


def _engines_text(engines: int) -> str:
    return "" if engines == 0 else f" of {engines} engine{'s' if engines > 1 else ''}"


def _last_text(last: LastStats) -> str:
    parts = [
        f"{_number(last.output_tokens_per_s, 'tokens/s')} (prompt {_number(last.prompt_tokens_per_s)})",
        f"{_number(last.running)} running",
        f"{_number(last.waiting)} waiting",
        f"KV use {_percent(last.kv_usage)}",
    ]
    if last.prefix_hit_rate is not None:
        parts.append(f"prefix hits {_percent(last.prefix_hit_rate)}")
    if last.preemptions is not None:
        parts.append(f"{last.preemptions} preemptions")
    return ", ".join(parts)


def _metrics_text(metrics: Metrics) -> str:
    return "\n".join(
        [
            f"engines           {_number(metrics.engines)}",
            f"running           {_number(metrics.running)}",
            f"waiting           {_number(metrics.waiting)}",
            f"KV use (largest)  {_percent(metrics.kv_usage_max)}",
            f"generated         {_number(metrics.generation_tokens_total, 'tokens')}",
            f"prompts           {_number(metrics.prompt_tokens_total, 'tokens')}",
            f"preemptions       {_number(metrics.preemptions_total)}",
            f"prefix queries    {_number(metrics.prefix_cache_queries_total, 'tokens')}",
            f"prefix hits       {_number(metrics.prefix_cache_hits_total, 'tokens')}",
        ]
    )


def _reading_text(reading: Reading) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(reading.t))
    metrics = reading.metrics
    if metrics is None:
        return f"{clock}  no answer"
    return (
        f"{clock}  {_number(metrics.running)} running, {_number(metrics.waiting)} waiting, "
        f"KV use {_percent(metrics.kv_usage_max)}, {_number(metrics.generation_tokens_total)} tokens generated, "
        f"{_number(metrics.preemptions_total)} preemptions"
    )


def _number(value: float | None, unit: str = "") -> str:
    text = "?" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    return f"{text} {unit}".strip()


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share * 100:.1f} %"
