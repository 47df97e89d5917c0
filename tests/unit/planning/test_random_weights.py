from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import InputError
from autotune.planning.random_weights import check, check_study, random_weights
from autotune.spec import parse_study

DUMMY = {"load_format": "dummy"}


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("speculative_config", "accept no draft"),
        ("speculative_config.method", "accept no draft"),
        ("spec_method", "accept no draft"),
        ("num_speculative_tokens", "accept no draft"),
        ("enable_expert_parallel", "balance means nothing"),
        ("enable_eplb", "balance means nothing"),
        ("eplb_config.window_size", "balance means nothing"),
    ],
)
def test_what_depends_on_the_weights_is_refused_with_the_reason(flag: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"{flag} is not tried with load_format=dummy.*{reason}") as caught:
        check(DUMMY, [*DUMMY, "max_num_seqs", flag])
    assert caught.value.exit_code == 2
    assert caught.value.hint
    check({}, [flag])
    check(DUMMY, ["specialize_active_lora", "max_num_seqs", "tensor_parallel_size"])


def test_only_dummy_weights_are_random() -> None:
    assert random_weights(DUMMY)
    assert not random_weights({"load_format": "safetensors"})
    assert not random_weights({})


@pytest.mark.parametrize(
    "part",
    [
        {"fixed": {**DUMMY, "enable_eplb": True}},
        {"fixed": DUMMY, "space": {"enable_expert_parallel": [True, False]}},
        {"fixed": DUMMY, "baselines": [{"label": "mine", "flags": {"speculative_config": {"method": "ngram"}}}]},
    ],
)
def test_a_study_is_refused_wherever_it_names_one(part: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not tried"):
        check_study(parse_study({"model": "a/b", **part}))
    check_study(parse_study({"model": "a/b", **part, "fixed": {}}))
