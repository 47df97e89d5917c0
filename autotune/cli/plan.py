"""``autotune plan``."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click

from autotune.cli.wiring import workload_options, write_json
from autotune.engines.flags import parse_assignment, render
from autotune.errors import NothingStableError
from autotune.records.settings import Settings
from autotune.records.trial import WorkloadSpec

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class Size(click.ParamType[int]):
    """``80GiB``, ``1.5g`` (both powers of 1,024), ``24GB`` (powers of 1,000) -> bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no size: write 80GiB or 1.5GiB", param, ctx)
        decimal = str(value).strip().lower().endswith("b") and not found[3]
        step = 1000 if decimal else 1024
        return int(float(found[1]) * float(step) ** "_kmgt".index(found[2].lower() or "_"))


@click.command()
@click.option("--model", required=True, help="Hub name or folder of the model; only its config.json is read.")
@click.option("--gpus", required=True, help="Hardware in words: 8xH200, 2xA100, RTX4090.")
@click.option("--workload", help="hle, synthetic, or a JSONL file of questions. [default: hle]")
@click.option("--lengths", help="File of answer lengths (lengths.json, JSON lines, CSV), or a shipped law.")
@click.option("--mean-output", type=click.IntRange(min=1), help="Mean answer length in tokens, where no file is there.")
@click.option("--requests", type=click.IntRange(min=1), help="Questions of the run. [default: the workload's]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Output limit of each answer. [default: 14336]")
@click.option("--set", "flags", multiple=True, metavar="FLAG=VALUE", help="For every candidate: --set dtype=bfloat16.")
@click.option("--gpu-memory", type=Size(), help="Memory of one card where it differs from the data sheet: 80GiB.")
@click.option("--gpu-used", type=Size(), help="Memory of one card that others hold (a display): 1.5GiB.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def plan(model: str, gpus: str, as_json: bool, **options: Any) -> None:
    """What fits and how long it will take, before any GPU is touched.

    From the model's config, the cards and the lengths: weights, KV cache, every tensor-parallel x data-parallel
    layout with its best number in flight, predicted tokens/s and makespan, best first. These are the settings
    that search would start first. Nothing is started; a model folder needs no network. Exit 3 when nothing fits,
    with what would.

    \b
    autotune plan --model Qwen/Qwen3-32B --gpus 8xH200
    autotune plan --model ./model --gpus 2xA100 --mean-output 4000 --requests 500 --set kv_cache_dtype=fp8
    autotune plan --model Qwen/Qwen3-32B --gpus RTX4090 --gpu-used 1.5GiB --json
    """
    from autotune.evaluation.predict import planned_run
    from autotune.hub import known_config
    from autotune.physics.gpus import parse_gpus
    from autotune.physics.model_card import ModelCard
    from autotune.planning.card import plan_data, plan_text, what_would_fit
    from autotune.planning.knowledge import Knowledge
    from autotune.planning.ranking import rank_layouts

    fixed = Settings(dict(parse_assignment(text) for text in options["flags"]))
    hardware = parse_gpus(gpus)
    if options["gpu_memory"] is not None:
        hardware = hardware.with_memory(options["gpu_memory"])
    hardware = hardware.with_used(options["gpu_used"] or 0)
    found = known_config(model)
    card = ModelCard.from_config(found.config, found.name)
    given = workload_options(options["workload"] or "hle", None, options["max_tokens"], None, None)
    fixed, run = planned_run(
        card,
        hardware,
        fixed,
        WorkloadSpec(**{name: value for name, value in given.items() if value is not None}),
        lengths=options["lengths"],
        mean_output=options["mean_output"],
        requests=options["requests"],
    )
    knowledge = Knowledge(card=card, hardware=hardware)
    ranked = rank_layouts(knowledge, run, fixed)
    if as_json:
        write_json(plan_data(knowledge, ranked, fixed))
    else:
        click.echo(plan_text(knowledge, ranked, fixed, run), nl=False)
    if not ranked[0].fits:
        hint = "; ".join(what_would_fit(knowledge, ranked, fixed))
        raise NothingStableError(f"{found.name} does not fit on {hardware.name}", hint=hint)
    if not as_json:
        click.echo(f"\nfirst start: {shlex.join(['vllm', 'serve', model, *render(ranked[0].settings)])}")
