"""Half a minute of load against ten minutes and more, on one real vLLM server on the CPU.

    python -m pytest -m proof tests/proof/test_real_windows.py -s

Forced, mixed lengths at three numbers in flight inside one server life. The truth is a load from a fresh start that
goes on for ten minutes after it has turned over twice, by the server's own counter; it is not corrected. Estimates
come from loads of 30 s in all that start in their steady state, before and after each truth. The same truth shows
what a fresh start would have said, and how long it needs for the same error. Nothing else may use the machine.
``AUTOTUNE_PROOF_TRUTH_S`` shortens the truth of 600 s (a try, not a proof).
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.engines.vllm import VllmEngine, VllmSession
from autotune.measure.judge import Known, judge
from autotune.measure.stationary import Prompt, StationaryLoad, stationary_load
from autotune.measure.window import Counter, View
from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import KnownLength
from autotune.records.load import LoadPlan
from autotune.records.measurement import Measurement
from autotune.records.observation import Observation
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, MeasureSpec
from tests.real_vllm import cpu_vllm

pytestmark = [pytest.mark.proof, pytest.mark.real_vllm, pytest.mark.timeout(4 * 3600)]

TRUTH_S = float(os.environ.get("AUTOTUNE_PROOF_TRUTH_S", "600"))
CONCURRENCIES = (6, 16, 40)
BEFORE, AFTER = 2, 1
"""Estimates before and after each truth."""
LOAD_S, WINDOW_S = 30.0, 20.0
LIMIT = 0.04
LAW = lognormal_law(mean=350, sigma=0.7, max_tokens=900)
ANSWERS = KnownLength(uncut=LAW, max_tokens=900)
SPEC = MeasureSpec(window_s=WINDOW_S, window_limit_s=WINDOW_S + 8, settle_limit_s=60.0)
IDS = range(1_000, 9_000)


def prompts() -> tuple[Prompt, ...]:
    rng = random.Random("real windows")
    return tuple(Prompt(id=f"q{i}", tokens=tuple(rng.choices(IDS, k=rng.randint(20, 90)))) for i in range(600))


@dataclass(frozen=True)
class EndsAt:
    """Stop rule: so many seconds of load."""

    seconds: float

    def __call__(self, so_far: Observation) -> str | None:
        return "long enough" if so_far.t_s >= self.seconds else None


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSession]:
    paths = cpu_vllm.install()
    spec = EngineSpec(
        kind="vllm",
        model=str(paths.model),
        vllm_command=f"{paths.vllm} serve",
        fixed=Settings(enforce_eager=True, max_model_len=1024, max_num_seqs=64),
    )
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    engine = VllmEngine(spec, folder=tmp_path_factory.mktemp("server"), environment=environment)
    with engine.session(Settings()) as running:
        yield running


class Bench:
    """Loads on the one server, none with text that another one had."""

    def __init__(self, session: VllmSession) -> None:
        self.session = session
        self.loads: list[Measurement] = []
        self._number = 0

    def load(self, n: int, seed: int) -> StationaryLoad:
        self._number += 1
        return stationary_load(
            LAW,
            prompts(),
            concurrency=n,
            refill=400 * n,
            seed=seed,
            salt=f"load-{self._number}",
            ids=IDS,
            first=97 * self._number,
        )

    def estimate(self, n: int, seed: int) -> Measurement:
        known = Known(load=self.load(n, seed), answers=ANSWERS)
        plan = LoadPlan(start=known.load.start, refill=known.load.refill)
        rule = known.rule(SPEC)
        seen = self.session.observe(plan, stop=lambda so_far: rule(so_far) or EndsAt(LOAD_S)(so_far))
        found = judge(seen, SPEC, self.session.capacity, known=known, earlier=self.loads)
        self.loads.append(found)
        return found

    def truth(self, n: int) -> tuple[float, Counter, float]:
        """Long-run rate, the counter it comes from, and when the load had turned over twice."""
        fresh = self.load(n, seed=99).refill
        plan = LoadPlan(start=fresh[:n], refill=fresh[n:])
        turned: list[float] = []

        def rule(so_far: Observation) -> str | None:
            ended = sum(r.ended_s is not None for r in so_far.requests)
            if not turned and ended >= 2 * n:
                turned.append(so_far.t_s)
            return "long enough" if turned and so_far.t_s >= turned[0] + TRUTH_S else None

        seen = self.session.observe(plan, stop=rule)
        assert seen.failure is None
        assert all(r.error is None for r in seen.requests)
        counter = View(seen).counter
        rate = counter.rate(turned[0], seen.t_s)
        assert rate is not None
        return rate.per_s, counter, turned[0]


def fresh_error(counter: Counter, begin_s: float, truth: float) -> float | None:
    """What a window of a fresh start from ``begin_s`` on is off by."""
    rate = counter.rate(begin_s, begin_s + WINDOW_S)
    return None if rate is None else rate.per_s / truth - 1


def good_from(counter: Counter, truth: float, error: float, until_s: float) -> float:
    """When a window of a fresh start has ended that is no more than ``error`` off, as are the next thirty seconds'."""
    for begin in range(round(until_s)):
        errors = [fresh_error(counter, begin + later, truth) for later in range(0, 31, 5)]
        if all(e is not None and abs(e) <= error for e in errors):
            return begin + WINDOW_S
    return until_s


def test_half_a_minute_of_load_shows_ten_minutes(session: VllmSession, tmp_path: Path) -> None:
    bench = Bench(session)
    print(f"\ntruth of {TRUTH_S:.0f} s and more, loads of {LOAD_S:.0f} s in all; errors in per cent")
    print("| in flight | truth tokens/s | estimates | uncorrected | half-width | fresh, 30 s | fresh needs s |")
    print("|---|---|---|---|---|---|---|")
    worst, wide = 0.0, []
    for n in CONCURRENCIES:
        loads = [bench.estimate(n, seed) for seed in range(BEFORE)]
        truth, counter, turned_s = bench.truth(n)
        loads += [bench.estimate(n, BEFORE + seed) for seed in range(AFTER)]
        errors, raw, halves = [], [], []
        for load in loads:
            assert load.outcome == "steady", (load.outcome, load.invalid_reasons, load.notes)
            assert load.output_tokens_per_s is not None
            assert load.correction is not None
            assert load.load_s <= LOAD_S + 2
            assert load.paired_low is not None
            assert load.paired_high is not None
            errors.append(load.output_tokens_per_s / truth - 1)
            raw.append(load.correction.window_tokens_per_s / truth - 1)
            halves.append((load.paired_high - load.paired_low) / 2 / load.output_tokens_per_s)
            wide.append(load.paired_low <= truth <= load.paired_high)
        fresh = fresh_error(counter, LOAD_S - WINDOW_S, truth)
        assert fresh is not None
        needs = good_from(counter, truth, max(map(abs, errors)), turned_s + TRUTH_S)
        shown = [" ".join(f"{100 * e:+.1f}" for e in values) for values in (errors, raw)]
        print(
            f"| {n} | {truth:.1f} | {shown[0]} | {shown[1]} | {100 * statistics.fmean(halves):.1f} "
            f"| {100 * fresh:+.1f} | {needs:.0f} |"
        )
        worst = max(worst, *map(abs, errors))
    print(f"worst estimate {100 * worst:.1f} % off; {sum(wide)} of {len(wide)} intervals hold the truth")
    assert worst <= LIMIT
