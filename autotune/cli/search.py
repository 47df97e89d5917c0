"""``autotune search``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autotune.cli.types import (
    Duration,
    KeyValue,
    latency_params,
    lengths_params,
    server_params,
    studies_option,
    workload_params,
)
from autotune.cli.wiring import (
    baseline_option,
    device_list,
    flag_values,
    latency_options,
    probe_options,
    study_spec,
    workload_options,
    write_json,
)
from autotune.errors import InputError
from autotune.records.codec import encode
from autotune.report.tables import forecast_text, gain_text
from autotune.search.folder import write_whole
from autotune.spec import StudySpec


@click.command()
@click.argument("study_file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@server_params
@workload_params
@lengths_params
@latency_params
@click.option("--requests", type=click.IntRange(min=1), help="Questions of the planned run. [default: the workload's]")
@click.option("--trials", type=click.IntRange(min=1), help="Server starts, baselines included. [default: 20]")
@click.option("--budget", type=Duration(), help="End after so long: 90m, 2h.")
@click.option("--set", "fixed", multiple=True, metavar="FLAG=VALUE", help="For every candidate: --set dtype=bfloat16.")
@click.option("--space", type=KeyValue(), multiple=True, help="A flag to search: --space 'max_num_seqs=[128,256]'.")
@click.option("--baseline", help="Your own line to beat: 'vllm serve MODEL -tp 8'.")
@click.option("--baseline-concurrency", type=click.IntRange(min=1), multiple=True, help="In flight with it. [32 100]")
@click.option("--study", "name", help="Name of the study. [default: MODEL_GPUS_WORKLOAD]")
@studies_option
@click.option("--seed", type=int, help="Seed of every draw. [default: 0]")
@click.option("--json", "as_json", is_flag=True, help="Print the winner record as JSON.")
def search(study_file: Path | None, studies: Path, as_json: bool, **options: Any) -> None:
    """Find the fastest stable server settings and number in flight for a run.

    Starts one vLLM server per candidate, loads it with the real questions at several concurrencies inside that
    one start, measures from the server's own counters, and keeps the best in studies/NAME/winner.json. Baselines
    come first. Running the same command again goes on where it stopped. STUDY_FILE is a TOML recipe; options
    override it.

    \b
    autotune search --model Qwen/Qwen3-32B --trials 20
    autotune search studies/cpu-smoke.toml
    autotune search --model ./model --workload questions.jsonl --max-tokens 2048 --space 'max_num_seqs=[64,128]'
    """
    spec = study_spec(study_file, _study_options(options))
    winner = run_search(spec, studies)
    if as_json:
        write_json(encode(winner))
        return
    rate = winner.measurement.output_tokens_per_s or 0.0
    click.echo(f"{winner.verdict}: {winner.settings}")
    click.echo(f"  {rate:,.0f} output tokens/s at {winner.client.concurrency} in flight (trial {winner.trial})")
    for gain in winner.gains:
        click.echo(f"  against {gain_text(gain)}")
    if winner.forecast is not None:
        click.echo(f"  {forecast_text(winner.forecast)}")
    click.echo(f"  {winner.why}; next: autotune apply best --study {winner.study}")


def run_search(spec: StudySpec, studies: Path) -> Any:
    """Lock, clean up after a killed run, search; returns the winner record."""
    from autotune import devices
    from autotune.engines import end_left_over
    from autotune.evaluation.loads import asked
    from autotune.executors.local import Local
    from autotune.report.live import Progress
    from autotune.search.folder import StudyFolder
    from autotune.search.loop import Search, check_resume
    from autotune.workloads import load

    gpus = devices.select(spec.devices) if spec.engine == "vllm" else ()
    if spec.gpus is None:
        spec = spec.model_copy(update={"gpus": devices.describe(gpus)})
    folder = StudyFolder(studies / spec.study_name)
    folder.create()
    with ExitStack() as stack:
        stack.enter_context(devices.lock(folder.lock_file, f"autotune search of study {folder.name}"))
        spec = _keep_stdin(spec, folder.path)
        check_resume(spec, folder.read_spec())
        load(asked(spec.engine_spec(), spec.workload))  # what is wrong with it is said before a server starts
        for gpu in gpus:
            stack.enter_context(devices.lock_gpu(gpu, f"autotune search of study {folder.name}"))
        progress = Progress(sys.stderr, trials=spec.trials)
        stack.callback(progress.close)
        for line in end_left_over(folder.attempts):
            click.echo(line, err=True)
        click.echo(_first_line(spec, folder.path), err=True)
        folder.write_spec(spec)
        search = Search(spec, folder, _space(spec, len(gpus)), Local(progress), progress)
        return search.run()


def _keep_stdin(spec: StudySpec, folder: Path) -> StudySpec:
    """Questions from stdin are kept in the study folder: a resumed search has no stdin any more."""
    if spec.workload.path != "-":
        return spec
    kept = folder / "questions.jsonl"
    write_whole(kept, sys.stdin.read())
    return spec.model_copy(update={"workload": replace(spec.workload, path=str(kept))})


def _space(spec: StudySpec, visible: int) -> Any:
    """What may be launched; on the simulator the hardware is the one described, elsewhere ``visible`` GPUs."""
    from autotune.evaluation.loads import asked
    from autotune.evaluation.predict import known_run
    from autotune.hub import known_config
    from autotune.physics.gpus import parse_gpus
    from autotune.physics.model_card import ModelCard
    from autotune.planning.space import space_of

    if spec.engine != "sim":
        return space_of(spec, visible)
    if spec.gpus is None:
        raise InputError("the simulator needs to know the hardware", hint="--gpus 8xH200")
    found, hardware = known_config(spec.model), parse_gpus(spec.gpus)
    run = known_run(asked(spec.engine_spec(), spec.workload))
    return space_of(
        spec,
        0 if hardware.gpu.is_cpu else hardware.count,
        card=ModelCard.from_config(found.config, found.name),
        hardware=hardware,
        longest_prompt=None if run is None else round(run.prompts.tokens[-1]),
    )


def _first_line(spec: StudySpec, path: Path) -> str:
    from autotune.evaluation.loads import asked
    from autotune.evaluation.predict import known_run

    workload = asked(spec.engine_spec(), spec.workload)
    questions = f"workload {workload.name}, max_tokens {workload.max_tokens}"
    if workload.law is not None:
        questions = f"no questions but lengths of the law {workload.law}, cut at max_tokens {workload.max_tokens}"
    sampling = "no sampling sent" if workload.sampling is None else f"sampling {dict(workload.sampling)}"
    run = known_run(workload, requests=spec.requests)
    requests = spec.requests or (f"{run.requests:,}" if run is not None else "all")
    return f"study {path}: {spec.model}, {questions}, {sampling}, {requests} requests, {spec.trials} trials"


def _study_options(options: dict[str, Any]) -> dict[str, Any]:
    baseline = options.get("baseline")
    kept = ("model", "name", "requests", "trials", "engine", "gpus", "vllm_command", "seed", "lengths", "real_time")
    return {
        **{key: options[key] for key in kept},
        "budget_s": options["budget"],
        "devices": device_list(options["devices"]),
        "fixed": flag_values(options["fixed"]),
        "space": dict(options["space"]) or None,
        "probe": probe_options(options["probe_limit"], options["probe_time"]),
        "measure": latency_options(options["max_ttft"], options["max_tpot"]),
        "baselines": None if baseline is None else [baseline_option(baseline, options["baseline_concurrency"])],
        "workload": workload_options(
            options["workload"],
            options["dataset_path"],
            options["max_tokens"],
            options["limit"],
            options["official_prompt"],
        ),
    }
