import dataclasses
import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.hub import shipped
from autotune.physics.gpus import parse_gpus
from autotune.physics.model_card import ModelCard
from autotune.physics.stepfit import (
    SLOWDOWN,
    PrefillBurst,
    StepWindow,
    fit,
    residuals,
    slowdown,
    steady,
)
from autotune.physics.stepstart import (
    FP8_SD,
    TRANSFER_SD,
    engine_limits,
    from_card,
    physics_model,
    transfer,
    transferred,
)
from autotune.physics.steptime import CONSTANTS, StepModel, cholesky
from autotune.records.codec import decode, encode

QWEN = ModelCard.from_config(shipped()["Qwen/Qwen3-32B"], "Qwen/Qwen3-32B")
H200 = parse_gpus("8xH200")
TRUTH = StepModel(t0_s=0.0195, sequence_s=2e-5, kv_token_s=6.5e-8, prefill_token_s=1.05e-4)


def window(model: StepModel, batch: float, kv: float, prompts: float = 0.0, *, factor: float = 1.0) -> StepWindow:
    return StepWindow(
        batch=batch,
        kv_tokens=kv,
        output_tokens_per_s=model.rate(batch, kv, prompts) * factor,
        prompt_tokens_per_s=prompts,
    )


def spread_windows(model: StepModel, seed: int = 0, noise: float = 0.0) -> list[StepWindow]:
    rng = random.Random(seed)
    return [
        window(model, b, b * rng.uniform(800, 5000), rng.uniform(0, 1500), factor=math.exp(rng.gauss(0, noise)))
        for b in (8, 8, 32, 32, 64, 64, 128, 128, 200, 200)
    ]


def test_a_step_adds_up() -> None:
    model = dataclasses.replace(TRUTH, beyond_s=1e-4, graph_limit=100)
    assert model.step_s(64, 1000, 10) == pytest.approx(0.0195 + 64 * 2e-5 + 1000 * 6.5e-8 + 10 * 1.05e-4)
    assert model.step_s(120, 0) - model.step_s(100, 0) == pytest.approx(20 * (2e-5 + 1e-4))


def test_arithmetic_is_a_floor_under_weights_and_sequences_only() -> None:
    model = dataclasses.replace(TRUTH, compute_s=1e-3)
    assert model.step_s(10, 0) == pytest.approx(0.0195 + 2e-4)
    assert model.step_s(100, 1000) == pytest.approx(0.1 + 6.5e-5)


def test_a_small_batch_reads_few_experts() -> None:
    model = dataclasses.replace(TRUTH, expert_s=0.016, expert_share=8 / 128)
    assert model.step_s(1, 0) == pytest.approx(0.0195 + 2e-5 - 0.016 * (1 - 8 / 128))
    assert model.step_s(200, 0) == pytest.approx(TRUTH.step_s(200, 0), rel=1e-4)


def test_rate_takes_prefill_off() -> None:
    assert TRUTH.rate(64, 200_000) == pytest.approx(64 / TRUTH.step_s(64, 200_000))
    assert TRUTH.rate(64, 200_000, 1000) == pytest.approx(TRUTH.rate(64, 200_000) * (1 - 0.105))
    assert TRUTH.rate(64, 200_000, 1e6) == 0.0
    assert TRUTH.rate(0, 0) == 0.0


def test_closed_rate_agrees_with_rate_at_its_own_prompt_rate() -> None:
    rate = TRUTH.closed_rate(64, 200_000, 300, 4000)
    assert rate == pytest.approx(TRUTH.rate(64, 200_000, rate * 300 / 4000))
    assert TRUTH.closed_rate(0, 0, 300, 4000) == 0.0


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_a_constant_is_a_duration(value: float) -> None:
    with pytest.raises(ValueError, match="t0_s must be a number of seconds"):
        dataclasses.replace(TRUTH, t0_s=value)


def test_draws_spread_as_the_covariance_says() -> None:
    model = dataclasses.replace(TRUTH, noise=0.0).with_sd(t0_s=0.1, kv_token_s=0.3)
    rng = random.Random(1)
    draws = [model.draw(rng) for _ in range(2000)]
    assert statistics.stdev(math.log(d.t0_s / TRUTH.t0_s) for d in draws) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(math.log(d.kv_token_s / TRUTH.kv_token_s) for d in draws) == pytest.approx(0.3, rel=0.1)
    assert {d.sequence_s for d in draws} == {TRUTH.sequence_s}


def test_noise_moves_all_constants_together() -> None:
    model = dataclasses.replace(TRUTH, noise=0.05)
    drawn = model.draw(random.Random(3))
    factors = {round(getattr(drawn, n) / getattr(TRUTH, n), 9) for n in CONSTANTS if getattr(TRUTH, n)}
    assert len(factors) == 1
    assert factors != {1.0}


def test_widened_adds_variances() -> None:
    model = TRUTH.with_sd(t0_s=0.3).widened(t0_s=0.4, kv_token_s=0.1)
    assert model.relative_sd["t0_s"] == pytest.approx(0.5)
    assert model.relative_sd["kv_token_s"] == pytest.approx(0.1)


def test_cholesky_of_a_singular_matrix() -> None:
    lower = cholesky(((4.0, 2.0, 0.0), (2.0, 1.0, 0.0), (0.0, 0.0, 0.0)))
    assert lower == [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_model_is_data() -> None:
    model = TRUTH.with_sd(t0_s=0.1)
    assert decode(StepModel, json.loads(json.dumps(encode(model)))) == model


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_least_squares_finds_exact_constants(seed: int) -> None:
    found = fit(spread_windows(TRUTH, seed))
    for name in ("t0_s", "sequence_s", "kv_token_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
    assert found.rows == 10


def test_least_squares_never_goes_below_zero_and_says_what_it_left_out() -> None:
    truth = dataclasses.replace(TRUTH, sequence_s=0.0)
    found = fit(spread_windows(truth, 4, noise=0.03))
    assert all(getattr(found, name) >= 0 for name in CONSTANTS)
    assert "beyond_s" in found.guesses


def test_a_fit_is_sure_of_what_was_seen_only() -> None:
    start = from_card(QWEN, H200, {})
    same = [window(TRUTH, 64, 150_000, factor=f) for f in (0.99, 1.0, 1.01)]
    model = fit(same, start)
    total = math.sqrt(model.relative_sd["t0_s"] ** 2)
    assert total < start.relative_sd["t0_s"]
    assert model.relative_sd["beyond_s"] == pytest.approx(start.relative_sd["beyond_s"])
    assert model.rate(64, 150_000) == pytest.approx(TRUTH.rate(64, 150_000), rel=0.02)


def test_three_concurrencies_make_the_fit_predict_others() -> None:
    start = from_card(QWEN, H200, {})
    truth = start.scaled(t0_s=1.15, kv_token_s=0.8, sequence_s=1.6, prefill_token_s=1.2)
    rng = random.Random(7)
    rows = [
        window(truth, b, kv, p, factor=math.exp(rng.gauss(0, 0.01)))
        for b, kv, p in ((8, 40_000, 60), (8, 42_000, 0), (64, 200_000, 400), (64, 210_000, 300), (120, 250_000, 900))
    ]
    model = fit(rows, start)
    for batch, kv, prompts in ((32, 120_000, 200), (100, 230_000, 600), (200, 260_000, 900)):
        assert model.rate(batch, kv, prompts) == pytest.approx(truth.rate(batch, kv, prompts), rel=0.03)
    assert {"t0_s", "kv_token_s"}.isdisjoint(model.guesses)
    assert "beyond_s" in model.guesses


def test_a_burst_teaches_the_prefill_constant() -> None:
    start = from_card(QWEN, H200, {})
    truth = start.scaled(prefill_token_s=1.8)
    burst = PrefillBurst(
        prompt_tokens_per_s=PrefillBurst(prompt_tokens_per_s=1, step_tokens=8192).predicted(truth), step_tokens=8192
    )
    rows = [window(truth, 8, 40_000), window(truth, 64, 200_000)]
    model = fit(rows, start, bursts=[burst])
    assert model.prefill_token_s == pytest.approx(truth.prefill_token_s, rel=0.08)
    assert model.relative_sd["prefill_token_s"] < 0.1
    assert fit(rows, start).prefill_token_s == pytest.approx(start.prefill_token_s, rel=0.2)


def test_the_floor_of_arithmetic_does_not_trap_the_fit() -> None:
    start = physics_model(
        weight_bytes=7e10,
        kv_bytes_per_token=163_840,
        active_parameters=7e10,
        layers=80,
        hidden_size=8192,
        bandwidth_bytes_per_s=4.3e12,
        flops_per_s=790e12,
        gpus=2,
    )
    truth = start.scaled(t0_s=0.6, sequence_s=0.2)
    rows = [window(truth, b, b * 1100, 20 * b) for b in (8, 8, 64, 64, 224, 224)]
    assert max(map(abs, residuals(fit(rows, start), rows))) < 0.03


def test_saturated_windows_are_refused() -> None:
    good = window(TRUTH, 64, 100_000)
    for bad in (
        dataclasses.replace(good, waiting=1.0),
        dataclasses.replace(good, preemptions=1.0),
        dataclasses.replace(good, kv_usage=0.95),
    ):
        assert bad.saturated
        with pytest.raises(ValueError, match="saturated"):
            fit([good, bad])
        assert steady([good, bad]) == [good]


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one window"):
        fit([])
    with pytest.raises(ValueError, match="without output"):
        fit([dataclasses.replace(window(TRUTH, 64, 100_000), output_tokens_per_s=0.0)])


def test_a_prior_without_doubt_is_kept() -> None:
    assert fit([window(TRUTH.scaled(t0_s=2.0), 64, 100_000)], TRUTH) is TRUTH


def test_slowed_windows_teach_all_but_the_level() -> None:
    start = from_card(QWEN, H200, {})
    rows = [window(start, 8, 40_000), window(start, 64, 150_000)]
    slow = [window(start, b, 250_000, factor=1 / 1.25) for b in (80, 120, 160)]
    model = fit(rows, start, slowed=slow)
    assert model.rate(64, 150_000) == pytest.approx(start.rate(64, 150_000), rel=0.03)
    assert slowdown(model, slow) == pytest.approx(1.25, rel=0.06)
    assert slowdown(model, []) == pytest.approx(SLOWDOWN)
    assert fit([], start, slowed=slow).rows == 0


def test_start_values_of_qwen3_32b_on_h200_are_those_of_its_fit() -> None:
    start = from_card(QWEN, H200, {})
    assert start.t0_s == pytest.approx(19.4e-3, rel=0.03)
    assert start.kv_token_s == pytest.approx(65.9e-9, rel=0.03)
    assert start.prefill_token_s == pytest.approx(105e-6, rel=0.06)
    assert start.graph_limit == 512
    assert start.guesses == CONSTANTS


def test_tensor_parallelism_divides_what_it_can() -> None:
    one, two = from_card(QWEN, H200, {}), from_card(QWEN, H200, {"tensor_parallel_size": 2})
    assert two.kv_token_s == pytest.approx(one.kv_token_s / 2)
    assert two.prefill_token_s == pytest.approx(one.prefill_token_s / 2)
    assert one.t0_s / 2 < two.t0_s < one.t0_s
    assert two.sequence_s > one.sequence_s
    assert two.relative_sd["t0_s"] > one.relative_sd["t0_s"]


def test_data_parallel_engines_are_single_engines() -> None:
    assert from_card(QWEN, H200, {"data_parallel_size": 4}) == from_card(QWEN, H200, {})


def test_an_fp8_cache_is_hardly_faster_and_less_certain() -> None:
    wide, narrow = from_card(QWEN, H200, {}), from_card(QWEN, H200, {"kv_cache_dtype": "fp8"})
    assert narrow.kv_token_s == pytest.approx(0.9 * wide.kv_token_s)
    assert narrow.relative_sd["kv_token_s"] == FP8_SD


def test_fp8_weights_halve_their_reading_and_the_arithmetic() -> None:
    wide, narrow = from_card(QWEN, H200, {}), from_card(QWEN, H200, {"quantization": "fp8"})
    assert wide.t0_s - narrow.t0_s == pytest.approx(0.5 * 65.5e9 / 4.3e12, rel=0.1)
    assert narrow.prefill_token_s == pytest.approx(wide.prefill_token_s / 2, rel=0.02)


def test_a_mixture_of_experts_reads_less_at_small_batches() -> None:
    card = ModelCard.from_config(shipped()["Qwen/Qwen3-235B-A22B"], "q")
    model = from_card(card, H200, {"tensor_parallel_size": 8})
    assert model.expert_share == pytest.approx(8 / 128)
    assert model.step_s(1, 0) < 0.5 * model.step_s(200, 0)


def test_window_layers_cost_a_sequence_not_a_token() -> None:
    gemma = ModelCard.from_config(shipped()["google/gemma-3-27b-it"], "g")
    model = from_card(gemma, H200, {})
    assert model.kv_token_s < 0.3 * from_card(QWEN, H200, {}).kv_token_s * 62 / 64 * 2
    assert model.sequence_s > 2e-5


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ({"max_num_seqs": 64}, 128),
        ({"enforce_eager": True}, 0),
        ({"max_cudagraph_capture_size": 1024}, 1024),
        ({"cudagraph_capture_sizes": [1, 8, 256]}, 256),
    ],
)
def test_graph_limit_follows_the_flags(flags: dict[str, object], limit: int) -> None:
    assert from_card(QWEN, H200, flags).graph_limit == limit


def test_bad_flags_are_named() -> None:
    with pytest.raises(InputError, match="tensor_parallel_size"):
        from_card(QWEN, H200, {"tensor_parallel_size": "two"})


def test_limits_of_one_engine() -> None:
    limits = engine_limits(QWEN, H200, {"data_parallel_size": 2, "max_num_seqs": 256}, 538_624)
    assert (limits.kv_tokens, limits.max_num_seqs, limits.block_size) == (269_312, 256, 16)
    assert limits.max_num_batched_tokens >= 256


def test_transfer_moves_differences_and_ratios() -> None:
    fitted = from_card(QWEN, H200, {}).scaled(t0_s=1.1, kv_token_s=0.9).with_sd(t0_s=0.02)
    fitted = dataclasses.replace(fitted, guesses=())
    moved = transfer(fitted, {}, {"tensor_parallel_size": 2}, QWEN, H200)
    one, two = from_card(QWEN, H200, {}), from_card(QWEN, H200, {"tensor_parallel_size": 2})
    assert moved.t0_s == pytest.approx(fitted.t0_s + two.t0_s - one.t0_s)
    assert moved.kv_token_s == pytest.approx(fitted.kv_token_s / 2)
    assert moved.relative_sd["t0_s"] == pytest.approx(math.hypot(0.02, TRANSFER_SD["t0_s"]))
    assert set(moved.guesses) == {"t0_s", "sequence_s", "kv_token_s", "prefill_token_s"}


def test_transfer_to_the_same_flags_changes_nothing() -> None:
    fitted = dataclasses.replace(from_card(QWEN, H200, {}).scaled(t0_s=1.1), guesses=("beyond_s",))
    same = transfer(fitted, {}, {}, QWEN, H200)
    assert [getattr(same, n) for n in CONSTANTS] == pytest.approx([getattr(fitted, n) for n in CONSTANTS])
    assert (same.guesses, same.log_covariance) == (fitted.guesses, fitted.log_covariance)


def test_transfer_to_an_fp8_cache_is_called_a_guess() -> None:
    fitted = dataclasses.replace(from_card(QWEN, H200, {}), guesses=())
    moved = transfer(fitted, {}, {"kv_cache_dtype": "fp8"}, QWEN, H200)
    assert moved.guesses == ("kv_token_s",)
    assert moved.relative_sd["kv_token_s"] > FP8_SD


def test_transfer_keeps_a_share_of_the_physical_value() -> None:
    start = from_card(QWEN, H200, {})
    small = transferred(start.scaled(t0_s=0.1), start, from_card(QWEN, H200, {"tensor_parallel_size": 8}))
    assert small.t0_s == pytest.approx(0.3 * from_card(QWEN, H200, {"tensor_parallel_size": 8}).t0_s)
