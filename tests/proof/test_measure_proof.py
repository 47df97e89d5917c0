"""Short windows against the long-run truth of hidden servers: bias, spread, and how often the intervals cover.

``AUTOTUNE_PROOF_DRAWS`` (200) draws a cell; each is another hidden server, start, load and draw of lengths. Seeds
are from 500,000 on; those of development were below 10,000.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from autotune.records.measurement import Measurement
from autotune.records.trial import MeasureSpec
from tests.unit.measure.long_runs import LIMITS, Server, long_rate, measured

DRAWS = int(os.environ.get("AUTOTUNE_PROOF_DRAWS", "200"))
FIRST_SEED = 500_000
PROBE = 128
SPEC = MeasureSpec(window_s=20.0, window_limit_s=30.0)
CELLS = [(tp, mean) for tp in (1, 2) for mean in LIMITS]

pytestmark = pytest.mark.proof


@dataclass(frozen=True)
class Draw:
    """One window with the truth; logarithms of ratios."""

    error: float
    raw_error: float
    half: float
    covered: bool
    wide_half: float
    wide_covered: bool
    window_s: float
    load_s: float


def draw_of(load: Measurement, truth: float) -> Draw:
    rate = load.output_tokens_per_s
    assert load.outcome == "steady", (load.outcome, load.invalid_reasons)
    assert rate is not None
    assert load.paired_low is not None
    assert load.paired_high is not None
    assert load.low is not None
    assert load.high is not None
    assert load.correction is not None
    assert load.window_s is not None
    return Draw(
        error=math.log(rate / truth),
        raw_error=math.log(load.correction.window_tokens_per_s / truth),
        half=math.log(load.paired_high / load.paired_low) / 2,
        covered=load.paired_low <= truth <= load.paired_high,
        wide_half=math.log(load.high / load.low) / 2,
        wide_covered=load.low <= truth <= load.high,
        window_s=load.window_s,
        load_s=load.load_s,
    )


@dataclass(frozen=True)
class Cell:
    """All draws of one shape of server and one mean answer."""

    tp: int
    mean: int
    in_flight: int
    known: tuple[Draw, ...]
    """Lengths known."""
    probed: tuple[Draw, ...]
    """Lengths from a probe of their own."""


def cell_of(tp: int, mean: int) -> Cell:
    known, probed, in_flight = [], [], []
    # Other servers in each cell: the same seed would be the same start and the same noise.
    first = FIRST_SEED + 10_000 * CELLS.index((tp, mean))
    for seed in range(first, first + DRAWS):
        server = Server(tp=tp, mean=mean, seed=seed)
        n = server.concurrency
        in_flight.append(n)
        truth = long_rate(server, n)
        for answers, draws in ((server.known(), known), (server.probe(PROBE), probed)):
            (load,) = measured(server, answers, concurrencies=[n], prior=server.physics, spec=SPEC)
            draws.append(draw_of(load, truth))
    return Cell(tp, mean, round(statistics.fmean(in_flight)), tuple(known), tuple(probed))


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return [cell_of(tp, mean) for tp, mean in CELLS]


def share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def mean_sd(errors: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(errors):+.2f} | {100 * statistics.stdev(errors):.2f}"


def row(*columns: object) -> None:
    print("| " + " | ".join(map(str, columns)) + " |")


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def test_half_a_minute_shows_the_long_run_when_lengths_are_known(cells: list[Cell]) -> None:
    print(f"\nLengths known, {DRAWS} draws a cell, KV 72 % in the long run; all in per cent of the truth")
    row(
        "TP",
        "mean answer",
        "in flight",
        "bias",
        "spread",
        "uncorrected bias",
        "spread",
        "covers",
        "half-width",
        "window s",
        "load s",
    )
    row(*["---"] * 11)
    for cell in cells:
        d = cell.known
        row(
            cell.tp,
            cell.mean,
            cell.in_flight,
            mean_sd([x.error for x in d]),
            mean_sd([x.raw_error for x in d]),
            percent(share([x.covered for x in d])),
            percent(statistics.median(x.half for x in d)),
            round(statistics.fmean(x.window_s for x in d)),
            round(statistics.fmean(x.load_s for x in d)),
        )
    pooled = share([x.covered for cell in cells for x in cell.known])
    print(f"pooled coverage of {len(cells) * DRAWS} intervals: {percent(pooled)} %")
    for cell in cells:
        errors = [x.error for x in cell.known]
        assert abs(statistics.fmean(errors)) < 0.015
        assert statistics.stdev(errors) < 0.02
        assert 0.90 <= share([x.covered for x in cell.known]) <= 0.98
        assert statistics.median(x.half for x in cell.known) <= 0.04
        assert max(x.window_s for x in cell.known) <= 31
    assert 0.93 <= pooled <= 0.97


def test_a_probe_s_error_is_in_the_interval(cells: list[Cell]) -> None:
    print(f"\nLengths from a probe of {PROBE} answers, another one for each of {DRAWS} draws a cell")
    row("TP", "mean answer", "bias", "spread", "covers", "half-width")
    row(*["---"] * 6)
    for cell in cells:
        d = cell.probed
        row(
            cell.tp,
            cell.mean,
            mean_sd([x.error for x in d]),
            percent(share([x.wide_covered for x in d])),
            percent(statistics.median(x.wide_half for x in d)),
        )
    pooled = share([x.wide_covered for cell in cells for x in cell.probed])
    print(f"pooled coverage of {len(cells) * DRAWS} intervals: {percent(pooled)} %")
    for cell in cells:
        assert 0.90 <= share([x.wide_covered for x in cell.probed]) <= 0.98
        assert statistics.median(x.wide_half for x in cell.probed) <= 0.12
    assert 0.93 <= pooled <= 0.97
