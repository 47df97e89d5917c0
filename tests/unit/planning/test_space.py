from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.planning.space import default_levels, knob_levels, space_of
from autotune.records.settings import Settings
from autotune.spec import Knob, StudySpec


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
