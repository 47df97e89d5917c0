"""``autotune forecast``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.types import Duration
from autotune.cli.wiring import write_json
from autotune.records.codec import encode
from autotune.records.trial import WorkloadSpec

if TYPE_CHECKING:
    from autotune.evaluation.follow import FollowForecast


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--requests", required=True, type=click.IntRange(min=1), help="Requests of the whole run, ended ones too."
)
@click.option("--max-tokens", required=True, type=click.IntRange(min=1), help="Output limit of each answer.")
@click.option("--at", "at_s", type=Duration(), help="As if it were then: 300, 5m after the first send. [default: now]")
@click.option("--lengths", help="File of answer lengths (lengths.json, JSON lines, CSV), or a shipped law.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text; times in seconds.")
def forecast(
    files: tuple[Path, ...], requests: int, max_tokens: int, at_s: float | None, lengths: str | None, as_json: bool
) -> None:
    """How long a run under way will take, this tool's or anyone's, from what its server says.

    FILE is the log of a vLLM server, the JSON lines of autotune scrape --write, or a CSV with the columns t_s,
    gen_tps, running, waiting and, if known, kv_pct, prompt_tps, completions; or several saved /metrics pages,
    with their seconds at the end of their names (page-0.txt page-10.txt). A CSV of bin_start_s and completions,
    as a client counts them, will do too, with a wide interval. No server is asked and no model need be known;
    how long the answers are is learnt from the run itself. Times count from the first send. The interval holds
    the total in 95 of 100 runs.

    \b
    autotune forecast server.log --requests 1000 --max-tokens 16384
    autotune forecast load.jsonl --requests 2158 --max-tokens 32768 --lengths studies/NAME/lengths.json
    autotune forecast server.log --requests 1000 --max-tokens 16384 --at 5m --json
    """
    from autotune.evaluation.follow import follow_files
    from autotune.evaluation.predict import known_run

    known = None if lengths is None else known_run(WorkloadSpec(name="hle", max_tokens=max_tokens), lengths=lengths)
    answers = None if known is None else known.answers
    found = follow_files(files, requests=requests, max_tokens=max_tokens, at_s=at_s, lengths=answers)
    if lengths is not None:
        if found.length_source == "completions":
            click.echo("note: --lengths is left out: completions alone do not show how far the answers are", err=True)
        else:
            found = dataclasses.replace(found, length_source=lengths)
    if as_json:
        write_json(encode(found))
    else:
        click.echo(_text(found))


def _text(found: FollowForecast) -> str:
    if found.done:
        lines = [f"done      in {_duration(found.elapsed_s)}"]
    else:
        lines = [
            f"total     {_duration(found.forecast_s)}, {_interval(found)}",
            f"elapsed   {_duration(found.elapsed_s)}",
            f"remaining {_duration(found.remaining_s)}",
        ]
    if found.kv_full_at_s is not None:
        tense = "was full" if found.kv_full_at_s <= found.elapsed_s else "full"
        lines.append(f"KV cache  {tense} at {_duration(found.kv_full_at_s)}: from then on sequences are preempted")
    lines.append(f"lengths   {found.length_source}")
    lines += [f"note      {limit}" for limit in found.limits]
    return "\n".join(lines)


def _interval(found: FollowForecast) -> str:
    return f"{found.level:.0%} between {_duration(found.low_s)} and {_duration(found.high_s)}"


def _duration(seconds: float) -> str:
    """``90 s``, ``23.9 min``, ``4.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
