"""``autotune doctor``: what a search needs on this host, and what to do about what is missing."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.types import studies_option
from autotune.errors import PrerequisiteError
from autotune.records.codec import dumps


@click.command()
@click.option("--vllm-command", default="vllm serve", show_default=True, help="What serves vLLM here.")
@studies_option
@click.option("--clean", is_flag=True, help="End servers of ours that a killed run left under --studies.")
@click.option("--no-load", is_flag=True, help="Leave out the client's ceiling: ten seconds on one or two cores.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def doctor(vllm_command: str, studies: Path, clean: bool, no_load: bool, as_json: bool) -> None:
    """What `autotune search` needs on this host: vLLM, GPUs, disk, caches, hub, limits, locks, left-over servers.

    Also measures what the load generator itself can carry here, against a server that computes nothing. Each line
    says what to do. Exit 2 when `search` could not start.

    \b
    autotune doctor
    autotune doctor --vllm-command '/opt/venv/bin/vllm serve' --clean
    """
    from autotune.engines.doctor import examine
    from autotune.measure.validity import CPU_LIMIT, LAG_FLOOR_S

    report = examine(vllm_command, studies, cpu_limit=CPU_LIMIT, lag_limit_s=LAG_FLOOR_S, clean=clean, load=not no_load)
    if as_json:
        click.echo(dumps(report, indent=2))
    else:
        for check in report.checks:
            click.echo(f"{check.status:8}{check.name:20}{check.text}")
            if check.hint is not None:
                click.echo(f"{'':28}-> {check.hint}")
    missing = ", ".join(check.name for check in report.checks if check.status == "missing")
    if missing:
        raise PrerequisiteError(f"`autotune search` could not start: {missing}", hint="see what is missing above")
