from __future__ import annotations

import pytest

from autotune.errors import InputError, NothingStableError
from autotune.physics.gpus import GIB, parse_gpus
from autotune.physics.memory import fits
from autotune.planning.space import (
    default_levels,
    kept_flags,
    knob_levels,
    layouts,
    needed_len,
    parallel_layouts,
    space_of,
)
from autotune.records.settings import Settings
from autotune.spec import Knob, StudySpec
from tests.unit.planning.runs import H200, card


@pytest.mark.parametrize(
    ("knob", "levels"),
    [
        (Knob(choices=(True, False)), (True, False)),
        (Knob(low=1, high=4), (1, 2, 3, 4)),
        (Knob(low=0.8, high=0.9, step=0.05), (0.8, 0.85, 0.9)),
        (Knob(low=64, high=1024, step=320), (64, 384, 704, 1024)),
    ],
)
def test_levels_of_a_knob(knob: Knob, levels: tuple[object, ...]) -> None:
    assert knob_levels("flag", knob) == levels


def test_long_ranges_are_cut_into_few_levels() -> None:
    levels = knob_levels("max_num_seqs", Knob(low=16, high=4096, log=True))
    assert len(levels) == 16
    assert (levels[0], levels[-1]) == (16, 4096)
    assert all(isinstance(level, int) for level in levels)
    floats = knob_levels("gpu_memory_utilization", Knob(low=0.5, high=0.95))
    assert (floats[0], floats[-1], len(floats)) == (0.5, 0.95, 16)


def test_the_space_leaves_out_what_vllm_refuses() -> None:
    spec = StudySpec(model="m", space={"max_num_seqs": (64, 512), "max_num_batched_tokens": (256, 2048)})
    space = space_of(spec, gpus=0)
    assert space.size == 4
    assert Settings(max_num_seqs=512, max_num_batched_tokens=256) not in set(space.candidates())
    assert len(list(space.candidates())) == 3


def test_fixed_flags_take_part_in_the_rules_and_are_not_varied() -> None:
    spec = StudySpec(model="m", fixed={"max_num_batched_tokens": 64}, space={"max_num_seqs": (32, 128)})
    assert list(space_of(spec, gpus=0).candidates()) == [Settings(max_num_seqs=32)]
    with pytest.raises(InputError, match="must be at least"):
        space_of(StudySpec(model="m", fixed={"max_num_batched_tokens": 8}, space={"max_num_seqs": (32,)}), gpus=0)


def test_default_layouts_fit_the_gpus() -> None:
    space = space_of(StudySpec(model="m"), gpus=4)
    layouts = {(s["tensor_parallel_size"], s["data_parallel_size"]) for s in space.candidates()}
    assert layouts == {(4, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)}
    assert "tensor_parallel_size" not in default_levels(1)
    assert "gpu_memory_utilization" not in default_levels(0)
    assert "max_num_seqs" not in space_of(StudySpec(model="m", fixed={"max_num_seqs": 7}), gpus=0).levels


def test_every_tp_and_dp_is_a_layout() -> None:
    assert parallel_layouts(1) == ((1, 1),)
    assert set(parallel_layouts(2)) == {(2, 1), (1, 2), (1, 1)}
    six = parallel_layouts(6)
    assert {(6, 1), (3, 2), (2, 3), (1, 6), (4, 1)} <= set(six)
    assert all(tp * dp <= 6 for tp, dp in six)
    assert six[0] == (6, 1)
    assert [tp * dp for tp, dp in six] == sorted((tp * dp for tp, dp in six), reverse=True)


def test_layouts_keep_what_is_fixed() -> None:
    assert set(layouts(4, {"tensor_parallel_size": 2})) == {
        Settings(tensor_parallel_size=2, data_parallel_size=dp) for dp in (1, 2)
    }
    assert layouts(8, {"tensor_parallel_size": 16}) == (Settings(tensor_parallel_size=16, data_parallel_size=1),)
    assert {s["data_parallel_size"] for s in layouts(8, {"tensor_parallel_size": 3})} == {1, 2}
    assert layouts(1, {}) == (Settings(tensor_parallel_size=1, data_parallel_size=1),)


def test_a_model_s_own_divisors_and_memory_shape_the_space() -> None:
    big = card("deepseek-ai/DeepSeek-V3")
    spec = StudySpec(model="m")
    space = space_of(spec, 8, card=big, hardware=H200, longest_prompt=1700)
    found = {(s["tensor_parallel_size"], s["data_parallel_size"]) for s in space.candidates()}
    assert found == {(8, 1), (4, 2), (2, 4), (1, 8)}  # 627 GiB of weights need all eight
    assert space.levels["max_model_len"] == (16_384,)
    assert "leave nothing" in (space.forbidden(Settings(tensor_parallel_size=4)) or "")
    odd = space_of(spec, 6, card=card(), hardware=parse_gpus("6xH200"))
    assert odd.levels["tensor_parallel_size"] == (4, 2, 1)
    assert "max_model_len" not in odd.levels


def test_in_doubt_it_may_be_launched() -> None:
    """The memory model is a prior: what misses by less than its error is not ruled out."""
    tight = Settings(max_model_len=40_960, gpu_memory_utilization=0.523)
    assert not fits(card(), parse_gpus("H200"), tight).fits
    spec = StudySpec(model="m", fixed=tight.to_data(), space={"max_num_seqs": (1024,)})
    assert list(space_of(spec, 1, card=card(), hardware=parse_gpus("H200")).candidates())
    hopeless = StudySpec(model="m", fixed={"gpu_memory_utilization": 0.45}, space={"max_num_seqs": (1024,)})
    with pytest.raises(NothingStableError, match="m does not fit on 1xH200") as caught:
        space_of(hopeless, 1, card=card(), hardware=parse_gpus("H200"))
    assert "2 x H200 serve max_model_len 40960" in (caught.value.hint or "")
    refused = StudySpec(model="m", space={"tensor_parallel_size": (4,)})
    with pytest.raises(InputError, match="may be launched"):
        space_of(refused, 1, card=card(), hardware=parse_gpus("H200"))


def test_the_context_is_as_long_as_the_longest_request() -> None:
    assert needed_len(card(), 14_336, 2048) == 16_384
    assert needed_len(card(), 14_336, 2049) == 17_408
    assert needed_len(card(), 100_000, 300) == 40_960


def test_flags_that_every_candidate_needs() -> None:
    kept = kept_flags(card(), H200, Settings(dtype="bfloat16"), max_tokens=14_336, longest_prompt=500)
    assert kept == Settings(dtype="bfloat16", max_model_len=16_384)
    own = Settings(max_model_len=8192)
    assert kept_flags(card(), H200, own, max_tokens=14_336, longest_prompt=500) == own
    desktop = parse_gpus("RTX 4090").with_used(3 * GIB)
    shared = kept_flags(card(), desktop, own, max_tokens=100, longest_prompt=10)
    assert shared["gpu_memory_utilization"] == 0.87
    full = parse_gpus("RTX 4090").with_used(30 * GIB)
    assert kept_flags(card(), full, own, max_tokens=100, longest_prompt=10) == own
    wished = own.with_(gpu_memory_utilization=0.9)
    assert kept_flags(card(), desktop, wished, max_tokens=100, longest_prompt=10) == wished
