from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.spec import StudySpec, parse_study, read_study

RECIPE = """
model = "org/Model-1B"
trials = 7
[workload]
name = "jsonl"
path = "questions.jsonl"
max_tokens = 256
[fixed]
dtype = "bfloat16"
[space]
max_num_seqs = [8, 16]
gpu_memory_utilization = {low = 0.8, high = 0.9}
[[baselines]]
label = "mine"
concurrency = [8]
[baselines.flags]
max_num_seqs = 4
"""


def test_a_recipe_becomes_a_study(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    spec = read_study(path)
    assert spec.trials == 7
    assert spec.workload.max_tokens == 256
    assert spec.space["max_num_seqs"].choices == (8, 16)
    assert spec.baselines[0].flags == {"max_num_seqs": 4}
    assert spec.study_name == "model-1b_local_jsonl"
    assert spec.engine_spec().fixed["dtype"] == "bfloat16"
    assert parse_study(spec.to_data()) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('modell = "x"', "did you mean 'model'"),
        ('model = ""', "hub name or a folder"),
        ('model = "x"\ntrials = 0', "trials"),
        ('model = "x"\n[space]\nmax_num_seqs = []', "list of values"),
        ('model = "x"\n[space]\nmax_num_seqs = [1, 1]', "each value once"),
        ('model = "x"\n[space]\nmax_num_seqs = {low = 4, high = 2}', "low must be below high"),
        ('model = "x"\n[space]\nmax_num_seqs = {low = 0, high = 2, log = true}', "log range"),
        ('model = "x"\n[space]\nmax_num_seqs = {low = 0, high = 2, step = 0}', "step"),
        ('model = "x"\n[space]\n"Max-Seqs" = [1]', "lower case"),
        ('model = "x"\n[fixed]\na = 1\n[space]\na = [1]', "either fixed or searched"),
        ('model = "x"\n[workload]\nname = "hle"\nmaxtokens = 1', "did you mean 'max_tokens'"),
        ('model = "x"\n[workload]\nname = "other"', "'hle', 'jsonl' or 'synthetic'"),
        ('model = "x"\n[[baselines]]\nlabel = "b"\nconcurrency = [0]', "at least 1"),
        ('model = "x"\nengine = "attached"', "base_url"),
        ("model = ", "no valid TOML"),
    ],
)
def test_a_bad_study_file_names_rule_and_value(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_study(path)
    assert words in str(caught.value)
    assert "hint:" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_file_and_binary_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_study(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no valid TOML"):
        read_study(tmp_path / "b.toml")


def test_the_fingerprint_follows_the_meaning_not_the_limits() -> None:
    spec = StudySpec(model="m")
    assert spec.fingerprint == StudySpec(model="m", trials=3, budget_s=5.0, name="x").fingerprint
    assert spec.fingerprint != StudySpec(model="m", fixed={"dtype": "half"}).fingerprint
    assert spec.fingerprint != StudySpec(model="n").fingerprint


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*StudySpec.model_fields, "other"]), VALUES))
def test_fuzzed_studies_raise_input_errors_only(data: dict[str, object]) -> None:
    with suppress(InputError):
        assert parse_study(data).model
