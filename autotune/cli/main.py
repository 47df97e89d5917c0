"""The command line: the group, what an error looks like, and which exit code it has."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from autotune import __version__
from autotune.cli.apply import apply
from autotune.cli.doctor import doctor
from autotune.cli.forecast import forecast
from autotune.cli.logs import log, scrape
from autotune.cli.measure import measure
from autotune.cli.plan import plan
from autotune.cli.probe import probe
from autotune.cli.report import report
from autotune.cli.search import search
from autotune.errors import AutotuneError

EXIT_BUG, EXIT_INPUT, EXIT_SIGINT, EXIT_SIGTERM = 1, 2, 130, 143


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find, prove, forecast and apply the fastest stable vLLM configuration for a long evaluation run.

    \b
    autotune search --model Qwen/Qwen3-32B --trials 20
    autotune apply best
    """


for command in (plan, search, apply, measure, probe, forecast, report, log, scrape, doctor):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of the design (0, 1, 2, 3, 4, 5, 130, 143)."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run one command and return its exit code; errors are told on stderr, without a traceback."""
    try:
        value: Any = cli.main(args=argv, prog_name="autotune", standalone_mode=False)
    except AutotuneError as error:
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_INPUT
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted: finished trials are kept, the same command goes on", err=True)
        return EXIT_SIGINT
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_BUG
    return value if isinstance(value, int) else 0


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGTERM)
