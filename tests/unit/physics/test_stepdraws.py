import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from autotune.physics.stepdraws import posterior_draws
from autotune.physics.stepfit import NOISE_PRIOR, SLOWDOWN, SLOWDOWN_SD, StepWindow, fit
from autotune.physics.steptime import CONSTANTS, StepModel

PRIOR = StepModel(
    t0_s=0.02, sequence_s=2e-5, kv_token_s=6e-8, prefill_token_s=1e-4, beyond_s=6e-5, graph_limit=256
).with_sd(t0_s=0.3, sequence_s=0.6, kv_token_s=0.3, prefill_token_s=0.3, beyond_s=0.8)
TRUTH = PRIOR.scaled(t0_s=1.2, sequence_s=0.7, kv_token_s=0.85, beyond_s=1.5)


def window(model: StepModel, batch: float, kv: float, factor: float = 1.0, weight: float = 1.0) -> StepWindow:
    rate = model.rate(batch, kv, 500.0) * factor
    return StepWindow(batch=batch, kv_tokens=kv, output_tokens_per_s=rate, prompt_tokens_per_s=500.0, weight=weight)


def draws(
    windows: Sequence[StepWindow], slowed: Sequence[StepWindow] = (), *, prior: StepModel = PRIOR, seed: int = 0
) -> list[tuple[StepModel, float]]:
    fitted = fit(windows, prior, slowed=slowed) if windows or slowed else prior
    return posterior_draws(prior, fitted, windows, slowed, 400, np.random.default_rng(seed))


def logs(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of logarithms."""
    found = [math.log(v) for v in values]
    return statistics.fmean(found), statistics.stdev(found)


def test_without_windows_draws_are_of_the_prior() -> None:
    found = draws([])
    for name, sd in PRIOR.relative_sd.items():
        mean, spread = logs([getattr(m, name) / getattr(PRIOR, name) for m, _ in found])
        assert mean == pytest.approx(0.0, abs=0.2 * sd)
        assert spread == pytest.approx(sd, rel=0.15)
    assert all(slow >= 1.0 for _, slow in found)
    assert logs([slow for _, slow in found])[0] == pytest.approx(math.log(SLOWDOWN), abs=0.02)


def test_one_unknown_has_the_posterior_of_the_textbook() -> None:
    # All but t0 is known: the logarithm of the rate is normal around that of 1 / t0.
    known = dict.fromkeys(CONSTANTS, 0.0001)
    prior = StepModel(t0_s=0.02, sequence_s=1e-9, kv_token_s=1e-12, prefill_token_s=1e-12, beyond_s=1e-12)
    prior = prior.with_sd(**{**known, "t0_s": 0.05})
    seen = StepWindow(batch=8, kv_tokens=0, output_tokens_per_s=prior.rate(8, 0) / 1.06, weight=0.25)
    error = NOISE_PRIOR / math.sqrt(0.25)
    share = 0.05**2 / (0.05**2 + error**2)
    mean, spread = logs([m.t0_s / prior.t0_s for m, _ in draws([seen], prior=prior)])
    assert mean == pytest.approx(share * math.log(1.06), abs=0.003)
    assert spread == pytest.approx(math.sqrt(share) * error, rel=0.12)


def test_what_was_measured_is_kept_though_its_parts_are_unknown() -> None:
    seen = [window(TRUTH, 100, 200_000, weight=4.0)]
    found = draws(seen)
    _, part = logs([m.t0_s for m, _ in found])
    mean, whole = logs([m.rate(100, 200_000, 500.0) / seen[0].output_tokens_per_s for m, _ in found])
    assert mean == pytest.approx(0.0, abs=0.01)
    assert whole < 0.015
    assert part > 5 * whole


def test_more_windows_find_the_constants() -> None:
    rng = random.Random(1)
    seen = [
        window(TRUTH, b, b * kv, math.exp(rng.gauss(0, 0.01)))
        for b in (4, 16, 64, 128, 256, 400, 512)
        for kv in (500, 4000)
    ]
    found = draws(seen)
    for name in ("t0_s", "kv_token_s", "beyond_s"):
        mean, spread = logs([getattr(m, name) / getattr(TRUTH, name) for m, _ in found])
        assert abs(mean) < 3 * spread + 0.02
        assert spread < 0.5 * PRIOR.relative_sd[name]


def test_preemption_slows_by_what_was_seen() -> None:
    steady = [window(TRUTH, b, b * 2000) for b in (16, 64, 128, 256)]
    slowed = [window(TRUTH, b, b * 2000, 1 / 1.3, weight=6.0) for b in (80, 120, 160)]
    own = [slow for _, slow in draws(steady, slowed)]
    usual = [slow for _, slow in draws(steady)]
    assert statistics.fmean(own) == pytest.approx(1.3, abs=0.04)
    assert statistics.fmean(usual) == pytest.approx(SLOWDOWN, abs=0.03)
    assert statistics.stdev(usual) == pytest.approx(SLOWDOWN * SLOWDOWN_SD, rel=0.25)
    assert statistics.stdev(own) < 0.6 * statistics.stdev(usual)


def test_slowed_windows_alone_tell_the_rate_as_well_as_the_usual_slow_down_is_known() -> None:
    slowed = [window(TRUTH, b, b * 2000, 1 / 1.2, weight=4.0) for b in (100, 110, 120)]
    _, before = logs([m.rate(110, 220_000) for m, _ in draws([])])
    mean, spread = logs(
        [m.rate(110, 220_000, 500.0) * 1.2 / TRUTH.rate(110, 220_000, 500.0) for m, _ in draws([], slowed)]
    )
    assert before > 2 * SLOWDOWN_SD
    assert spread < 1.15 * SLOWDOWN_SD
    # As seen, times the usual factor, drawn a little towards the prior.
    assert mean == pytest.approx(math.log(SLOWDOWN), abs=0.06)


def test_arithmetic_is_a_floor_in_draws_too() -> None:
    # With a floor far above t0 + sequence the rate teaches nothing of t0.
    prior = StepModel(
        t0_s=0.001, sequence_s=1e-6, kv_token_s=1e-9, prefill_token_s=1e-6, beyond_s=1e-6, compute_s=1e-3
    ).with_sd(t0_s=0.3, sequence_s=0.3, kv_token_s=0.3, prefill_token_s=0.3, beyond_s=0.3)
    seen = [StepWindow(batch=100, kv_tokens=1000, output_tokens_per_s=prior.rate(100, 1000), weight=10.0)]
    _, spread = logs([m.t0_s for m, _ in draws(seen, prior=prior)])
    assert spread == pytest.approx(0.3, rel=0.15)


def test_draws_are_models_without_doubt_and_the_same_for_a_seed() -> None:
    seen = [window(TRUTH, 64, 100_000)]
    first, again, other = draws(seen), draws(seen), draws(seen, seed=1)
    assert len(first) == 400
    assert first == again
    assert first != other
    assert all(set(m.relative_sd.values()) == {0.0} and m.noise == 0.0 for m, _ in first)
    assert all(m.graph_limit == PRIOR.graph_limit for m, _ in first)
