from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.records.codec import RecordError, decode, dumps, encode, loads
from autotune.records.load import LoadPlan, Message, Request
from autotune.records.observation import Capacity, Failure
from autotune.records.settings import Settings
from autotune.records.trial import ConcurrencyPlan, EngineSpec, TrialResult, TrialTask, WorkloadSpec

TASK = TrialTask(
    number=3,
    kind="search",
    settings=Settings(max_num_seqs=64, kv_cache_dtype="fp8"),
    engine=EngineSpec(kind="vllm", model="a/b", devices=(0, 1), fixed=Settings(dtype="bfloat16")),
    workload=WorkloadSpec(name="jsonl", path="q.jsonl", sampling={"temperature": 0.6}),
    concurrency=ConcurrencyPlan(values=(8, 64)),
)


def test_a_task_survives_the_round_trip() -> None:
    text = dumps(TASK)
    assert json.loads(text)["schema"] == "autotune/task/1"
    assert json.loads(text)["settings"] == {"kv_cache_dtype": "fp8", "max_num_seqs": 64}
    assert loads(TrialTask, text) == TASK


def test_missing_keys_take_defaults_and_unknown_ones_are_ignored() -> None:
    data = encode(TASK)
    del data["measure"]
    data["from_the_future"] = {"x": 1}
    assert decode(TrialTask, data) == TASK


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"number": "three"}, "TrialTask.number"),
        ({"number": True}, "TrialTask.number"),
        ({"kind": "other"}, "TrialTask.kind"),
        ({"engine": 3}, "TrialTask.engine"),
        ({"engine": {"kind": "vllm"}}, "TrialTask.engine.model is missing"),
        ({"settings": ["a"]}, "TrialTask.settings"),
        ({"concurrency": {"values": [1, "x"]}}, "TrialTask.concurrency.values[1]"),
        ({"workload": {"name": "hle", "sampling": {"t": "hot"}}}, "sampling.t"),
    ],
)
def test_a_wrong_value_names_its_place(change: dict[str, object], place: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(TrialTask, {**encode(TASK), **change})
    assert place in str(caught.value)


def test_text_that_is_no_json_is_a_record_error() -> None:
    with pytest.raises(RecordError, match="not JSON"):
        loads(TrialTask, "{")


def test_nan_becomes_null_and_infinity_is_refused() -> None:
    assert encode(math.nan) is None
    with pytest.raises(ValueError, match="JSON"):
        dumps({"x": math.inf})


def test_whole_floats_are_accepted_as_numbers() -> None:
    capacity = decode(
        Capacity, {"kv_tokens": 5.0, "engines": 1, "max_model_len": None, "max_num_seqs": None, "source": "log"}
    )
    assert capacity.kv_tokens == 5
    assert isinstance(capacity.kv_tokens, int)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z"),
        st.one_of(st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_settings_round_trip(values: dict[str, object]) -> None:
    flags = Settings(values)
    assert loads(Settings, dumps(flags)) == flags
    assert hash(loads(Settings, dumps(flags))) == hash(flags)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_random_data_never_raises_anything_else(data: object) -> None:
    for cls in (TrialTask, TrialResult, Failure):
        try:
            decode(cls, data)
        except RecordError:
            continue


def test_settings_compare_by_value_and_type() -> None:
    assert Settings(a=1) == Settings({"a": 1, "b": None})
    assert Settings(a=1) != Settings(a=True)
    assert Settings(a=1) != {"a": 1}
    assert Settings(b=2, a=1).fingerprint == Settings(a=1, b=2).fingerprint
    assert str(Settings()) == "(vLLM defaults)"
    assert Settings(a=1).with_(a=None, c=[1]) == Settings(c=[1])
    with pytest.raises(ValueError, match="lower case"):
        Settings({"--Max": 1})
    with pytest.raises(ValueError, match="whole number"):
        Settings(tensor_parallel_size="2").integer("tensor_parallel_size", 1)


def test_requests_and_plans_check_themselves() -> None:
    message = (Message(role="user", content="hi"),)
    with pytest.raises(ValueError, match="exactly one"):
        Request(id="a", max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens"):
        Request(id="a", max_tokens=0, messages=message)
    with pytest.raises(ValueError, match="at least one"):
        LoadPlan(start=())
    assert LoadPlan(start=(Request(id="a", max_tokens=1, messages=message),)).concurrency == 1
