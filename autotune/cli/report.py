"""``autotune report``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from autotune.cli.types import studies_option
from autotune.cli.wiring import open_study, write_json, write_out
from autotune.records.trial import TrialResult
from autotune.records.winner import Winner
from autotune.report import tables


@click.command()
@click.argument("study", required=False)
@studies_option
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.option("--markdown", is_flag=True, help="Markdown instead of a terminal table.")
@click.option("--write", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write Markdown into FILE.")
def report(study: str | None, studies: Path, as_json: bool, markdown: bool, file: Path | None) -> None:
    """What a study found: the winner, its gain over each baseline, and every trial with its reason.

    STUDY is a name under --studies or a folder; the newest one when left out.

    \b
    autotune report
    autotune report qwen3-32b_8xh200_hle --write report.md
    """
    folder = open_study(study, studies)
    results = folder.trials()
    winner = folder.read_winner() if folder.winner_file.exists() else None
    if as_json:
        write_json(tables.report_data(folder.name, results, winner))
    elif markdown or file is not None:
        write_out(tables.markdown(folder.name, results, winner), file)
    else:
        _print(folder.name, results, winner)


def _print(study: str, results: list[TrialResult], winner: Winner | None) -> None:
    console = Console(highlight=False, markup=False)
    console.print(tables.markdown(study, [], winner).split("| trial")[0].replace("**", "").strip())
    table = Table(*tables.COLUMNS, box=None, pad_edge=False)
    for row in tables.trial_rows(results):
        table.add_row(*row)
    console.print(table)
