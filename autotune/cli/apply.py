"""``autotune apply``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from autotune.apply.command import render_command
from autotune.cli.types import studies_option
from autotune.cli.wiring import open_study, write_out


@click.command()
@click.argument("which", type=click.Choice(["best"]))
@click.option("--study", help="Name or folder of the study; the newest one when left out.")
@studies_option
@click.option("--to", "target", type=click.Choice(["command", "yaml"]), default="command", show_default=True)
@click.option("--write", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write into FILE, not stdout.")
@click.option("--serve", is_flag=True, help="Start the server here, in the foreground, with the winner's settings.")
def apply(which: str, study: str | None, studies: Path, target: str, file: Path | None, serve: bool) -> None:
    """Use what a search found: a command to paste, a file for `vllm serve --config`, or the server itself.

    The client's side (requests in flight, max_tokens, time limit) is told in comments: the best server with
    the wrong number in flight is slow.

    \b
    autotune apply best
    autotune apply best --to yaml --write serve.yaml
    autotune apply best --serve
    """
    from autotune.apply.config import render_yaml

    winner = open_study(study, studies).read_winner()
    if winner.verdict != "winner":
        click.echo(f"note: {winner.verdict}: {winner.why}", err=True)
    if serve:
        click.echo(render_command(winner), err=True)
        os.execvp(winner.argv[0], winner.argv)
    write_out(render_command(winner) if target == "command" else render_yaml(winner), file)
