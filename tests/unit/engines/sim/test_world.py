"""The hidden world: like the physics, but not quite; the same for the same seed."""

from __future__ import annotations

import math
import statistics

import pytest

from autotune.engines.sim import SimWorld, Truth
from autotune.errors import InputError
from autotune.physics.memory import fits
from autotune.physics.model_card import ModelCard
from autotune.physics.stepstart import from_card
from autotune.physics.steptime import CONSTANTS
from autotune.records.settings import Settings
from tests.unit.engines.sim.machines import CARD, H200

TP8 = Settings(tensor_parallel_size=8)


def truth(world: SimWorld, **flags: object) -> Truth:
    return world.hidden_truth(CARD, H200, flags)


def test_the_same_seed_is_the_same_world() -> None:
    assert truth(SimWorld(3), tensor_parallel_size=8) == truth(SimWorld(3), tensor_parallel_size=8)
    assert truth(SimWorld(3)).model != truth(SimWorld(4)).model
    assert truth(SimWorld(3)).limits != truth(SimWorld(4)).limits


def test_constants_are_ten_per_cent_off_and_the_same_for_all_families() -> None:
    start = from_card(CARD, H200, {})
    logs = [
        math.log(getattr(truth(SimWorld(seed)).model, name) / getattr(start, name))
        for seed in range(200)
        for name in CONSTANTS
    ]
    assert statistics.stdev(logs) == pytest.approx(0.10, rel=0.1)
    assert abs(statistics.fmean(logs)) < 0.02
    other = from_card(CARD, H200, TP8)
    one, eight = truth(SimWorld(5)).model, truth(SimWorld(5), tensor_parallel_size=8).model
    assert eight.kv_token_s / other.kv_token_s == pytest.approx(one.kv_token_s / start.kv_token_s)


def test_capacity_is_near_the_physics_but_hidden() -> None:
    expected = fits(CARD, H200, {}).kv_capacity_tokens
    seen = [truth(SimWorld(seed)).fit.kv_capacity_tokens for seed in range(20)]
    assert all(abs(tokens / expected - 1) < 0.03 for tokens in seen)
    assert len(set(seen)) > 15
    two = truth(SimWorld(1), data_parallel_size=2)
    assert two.engines == 2
    assert two.limits.kv_tokens == two.fit.kv_capacity_tokens // 2


def test_a_family_and_a_knob_are_tilted_by_name() -> None:
    world = SimWorld(1, tilt={"tensor_parallel_size=8": 0.7, "max_num_batched_tokens=8192": 1.1})
    plain = SimWorld(1)

    def speed(**flags: object) -> float:
        return truth(plain, **flags).model.step_s(64, 1e5) / truth(world, **flags).model.step_s(64, 1e5)

    assert speed(tensor_parallel_size=8, max_num_batched_tokens=4096) == pytest.approx(0.7)
    assert speed(tensor_parallel_size=8, max_num_batched_tokens=8192) == pytest.approx(0.77)
    assert speed(tensor_parallel_size=4) == pytest.approx(1.1)  # 8,192 is the default
    assert speed(tensor_parallel_size=4, max_num_batched_tokens=2048) == pytest.approx(1.0)


def test_several_flags_name_one_family() -> None:
    world = SimWorld(1, tilt={"tensor_parallel_size=2,data_parallel_size=4": 2.0, "kv_cache_dtype=fp8": 0.5})
    family = {"tensor_parallel_size": 2, "data_parallel_size": 4}
    half = truth(world, **family).model.t0_s / truth(SimWorld(1), **family).model.t0_s
    assert half == pytest.approx(0.5)
    assert truth(world, tensor_parallel_size=2).model == truth(SimWorld(1), tensor_parallel_size=2).model
    assert truth(world, kv_cache_dtype="fp8").model.t0_s > truth(SimWorld(1), kv_cache_dtype="fp8").model.t0_s


@pytest.mark.parametrize(
    ("tilt", "says"), [({"tp": 1.1}, "flag=value"), ({"x=1": 0.0}, "above 0"), ({"x=1": math.nan}, "above 0")]
)
def test_a_tilt_that_cannot_be(tilt: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        SimWorld(0, tilt=tilt)


def test_residuals_belong_to_each_set_of_flags() -> None:
    world = SimWorld(2, residual_sd=0.05)
    ratios = [
        math.log(truth(world, max_num_seqs=n).model.t0_s / truth(SimWorld(2), max_num_seqs=n).model.t0_s)
        for n in range(100, 160)
    ]
    assert statistics.stdev(ratios) == pytest.approx(0.05, rel=0.4)
    assert truth(world, max_num_seqs=100) == truth(world, max_num_seqs=100)


def test_noise_of_start_and_load_is_one_per_cent_each() -> None:
    world = SimWorld(9)

    def common(start: int, load: int) -> float:
        noise = world.noise(TP8, start, load)
        return statistics.fmean(math.log(noise()) for _ in range(300))

    assert common(0, 0) == common(0, 0)
    starts = [statistics.fmean(common(start, load) for load in range(12)) for start in range(40)]
    loads = [common(0, load) for load in range(60)]
    assert statistics.stdev(starts) == pytest.approx(0.0104, rel=0.4)
    assert statistics.stdev(loads) == pytest.approx(0.0101, rel=0.4)


def test_some_worlds_run_out_of_memory_under_load_above_a_share() -> None:
    worlds = [SimWorld(seed) for seed in range(60)]
    dying = [w for w in worlds if w.dies_after_s(TP8, truth(w, gpu_memory_utilization=0.97), 0) is not None]
    assert 15 < len(dying) < 45
    assert all(w.dies_after_s(TP8, truth(w, gpu_memory_utilization=0.96), 0) is None for w in worlds)
    always = SimWorld(1, oom_above=0.5)
    assert always.dies_after_s(TP8, truth(always), 0) is not None


def test_a_question_has_one_length_whatever_is_asked() -> None:
    world = SimWorld(3)
    shares = [world.share_of(f"q{i}") for i in range(400)]
    assert shares[:3] == [world.share_of(f"q{i}") for i in range(3)]
    assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.05)
    assert SimWorld(4).share_of("q0") != shares[0]


def test_the_longest_request_always_has_room() -> None:
    # 1,000 tokens are 62.5 blocks; and a model with window layers
    tight = truth(SimWorld(0), max_model_len=1000, num_gpu_blocks_override=63)
    assert tight.fit.fits
    assert tight.limits.kv_tokens >= 1008
    from autotune.hub import shipped

    gemma = ModelCard.from_config(shipped()["google/gemma-3-27b-it"], "gemma")
    held = SimWorld(0).hidden_truth(gemma, H200, {"max_model_len": 32_768})
    assert held.limits.kv_tokens >= 32_768
    assert held.limits.kv_tokens != held.fit.kv_capacity_tokens
