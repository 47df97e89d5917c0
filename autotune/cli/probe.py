"""``autotune probe``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from autotune.cli.types import lengths_params, server_params, studies_option, workload_params
from autotune.cli.wiring import device_list, flag_values, probe_options, study_spec, workload_options, write_json
from autotune.errors import InputError, NothingStableError
from autotune.records.lengths import Lengths
from autotune.records.trial import TrialResult, TrialTask
from autotune.spec import StudySpec


@click.command()
@server_params
@workload_params
@lengths_params
@click.option("--set", "flags", multiple=True, metavar="FLAG=VALUE", help="A server flag: --set max_num_seqs=256.")
@click.option("--study", "name", help="Study that keeps the lengths. [default: MODEL_GPUS_WORKLOAD]")
@click.option("--again", is_flag=True, help="Probe even where the lengths are known.")
@studies_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def probe(studies: Path, again: bool, as_json: bool, **options: Any) -> None:
    """Find out how long answers are: real answers to a sample of the questions, once for model and workload.

    Starts one server, asks 128 questions with the run's own limit and sampling, stops it. The lengths go to
    studies/NAME/lengths.json (numbers only), where search, measure, plan and forecast find them; the answers stay
    in studies/NAME/answers/ for the full run. search does the same inside its first start. With --lengths FILE
    nothing is started: it shows what the file says.

    \b
    autotune probe --model Qwen/Qwen3-32B --set tensor_parallel_size=8
    autotune probe --model ./model --workload questions.jsonl --max-tokens 2048 --probe-time 2m
    """
    from autotune.search.folder import StudyFolder
    from autotune.search.known_lengths import study_lengths

    spec = study_spec(None, _options(options))
    folder = StudyFolder(studies / spec.study_name)
    known = study_lengths(spec, folder)
    if known.law is not None:
        raise InputError(f"{known.law} is a law, not a file of lengths", hint="`autotune plan --lengths` uses it")
    lengths, seconds = known.lengths, None
    if lengths is None or (again and spec.lengths is None):
        result = _run(spec, folder)
        lengths, seconds = result.lengths, result.total_s
        if lengths is None:
            line = "too few answers ended" if result.failure is None else result.failure.line
            hint = "a longer --probe-time" if result.failure is None else result.failure.hint
            raise NothingStableError(f"no lengths were found: {line}", hint=hint)
        folder.write_lengths(lengths)
    elif known.text is not None:
        click.echo(f"{known.text} (--again probes once more)", err=True)
    data = probe_data(lengths, spec.workload.max_tokens, seconds)
    if as_json:
        write_json(data)
    else:
        _tell(data)
        click.echo(f"lengths: {spec.lengths or folder.lengths_file}", err=True)


def probe_data(lengths: Lengths, max_tokens: int, seconds: float | None) -> dict[str, Any]:
    """The object of ``probe --json``: what the answers say of their law, cut at the run's limit."""
    from autotune.physics.lengths import observed_lengths

    observed = observed_lengths(lengths, max_tokens, prior=True)
    low, high = observed.mean_interval()
    return {
        "schema": "autotune/probe/1",
        "answers": len(lengths.answers),
        "ended": sum(answer.ended for answer in lengths.answers),
        "mean_output_tokens": observed.law.mean,
        "mean_low": low,
        "mean_high": high,
        "median_output_tokens": observed.law.quantile(0.5),
        "truncated_share": observed.law.cut_share,
        "truncated_share_high": observed.cut_upper(),
        "in_flight_tokens": observed.law.age_mean,
        "mean_prompt_tokens": sum(lengths.prompt_tokens) / max(1, len(lengths.prompt_tokens)) or None,
        "max_tokens": max_tokens,
        "source": lengths.source,
        "total_s": seconds,
    }


def _run(spec: StudySpec, folder: Any) -> TrialResult:
    """Lock, clean up after a killed run, probe."""
    from autotune import devices
    from autotune.engines import end_left_over
    from autotune.report.live import Progress
    from autotune.search.trial import run_trial

    folder.create()
    engine, owner = spec.engine_spec(), f"autotune probe of study {folder.name}"
    with ExitStack() as stack:
        stack.enter_context(devices.lock(folder.lock_file, owner))
        for gpu in devices.select(spec.devices) if spec.engine == "vllm" else ():
            stack.enter_context(devices.lock_gpu(gpu, owner))
        progress = Progress(sys.stderr)
        stack.callback(progress.close)
        for line in end_left_over(folder.attempts):
            click.echo(line, err=True)
        task = TrialTask(
            number=0,
            kind="probe",
            settings=engine.fixed,
            engine=engine,
            workload=spec.workload,
            measure=spec.measure,
            folder=str(folder.attempts / "probe"),
            probe=spec.probe,
            answers=str(folder.answers),
        )
        return run_trial(task, emit=progress)


def _tell(data: dict[str, Any]) -> None:
    click.echo(
        f"{data['answers']} answers, {data['ended']} of them ended: mean {data['mean_output_tokens']:,.0f} tokens "
        f"({data['mean_low']:,.0f}-{data['mean_high']:,.0f}), half of them up to {data['median_output_tokens']:,.0f}"
    )
    click.echo(
        f"cut at {data['max_tokens']:,}: {data['truncated_share']:.0%} (at most {data['truncated_share_high']:.0%}); "
        f"written so far by an answer in flight: {data['in_flight_tokens']:,.0f} tokens on average"
    )


def _options(options: dict[str, Any]) -> dict[str, Any]:
    if options["probe_limit"] == 0:
        raise InputError("--probe-limit 0 asks for no probe", hint="at least 64 answers tell how long they are")
    return {
        **{key: options[key] for key in ("model", "name", "engine", "gpus", "vllm_command", "lengths")},
        "devices": device_list(options["devices"]),
        "fixed": flag_values(options["flags"]),
        "probe": probe_options(options["probe_limit"], options["probe_time"]),
        "workload": workload_options(
            options["workload"],
            options["dataset_path"],
            options["max_tokens"],
            options["limit"],
            options["official_prompt"],
        ),
    }
