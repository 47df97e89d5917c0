from __future__ import annotations

import click
import pytest

from autotune.cli.types import Duration, KeyValue
from autotune.cli.wiring import device_list, study_spec, workload_options
from autotune.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1.5h", 5400), (5, 5)]
)
def test_durations(text: object, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2 hours", "h", "-3s", "0", "2h x"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("max_num_seqs=8", ("max_num_seqs", 8)),
        ("--max-num-seqs=8", ("max_num_seqs", 8)),
        ("a=true", ("a", True)),
        ("a=fp8", ("a", "fp8")),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a=x=y", ("a", "x=y")),
        ("a=NaN", ("a", "NaN")),
    ],
)
def test_key_values(text: str, pair: tuple[str, object]) -> None:
    assert KeyValue().convert(text, None, None) == pair


@pytest.mark.parametrize("text", ["a", "=3", ""])
def test_bad_key_values(text: str) -> None:
    with pytest.raises(click.BadParameter):
        KeyValue().convert(text, None, None)


def test_options_override_the_file_and_defaults_stay() -> None:
    spec = study_spec(None, {"model": "m", "trials": None, "workload": workload_options(None, None, 64, None, None)})
    assert (spec.workload.name, spec.workload.max_tokens, spec.trials) == ("hle", 64, 20)
    with pytest.raises(InputError, match="--model is needed"):
        study_spec(None, {"model": None})


def test_device_lists() -> None:
    assert device_list("0,1") == [0, 1]
    assert device_list(None) is None
    with pytest.raises(InputError, match="GPU indices"):
        device_list("a")
