"""Which trial is best, and by how much: pure functions from trial results to the winner record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from autotune.measure.intervals import ratio
from autotune.records.forecast import Forecast
from autotune.records.load import request_limit_s
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult
from autotune.records.winner import ClientSide, Gain, Verdict, Winner
from autotune.spec import StudySpec


def objective_s(result: TrialResult) -> float | None:
    """What the study minimises: seconds per 1,000 output tokens at the trial's best load."""
    best = result.measurement
    return None if best is None or not best.output_tokens_per_s else 1000.0 / best.output_tokens_per_s


def best_trial(results: Sequence[TrialResult]) -> TrialResult | None:
    """The stable trial with the lowest objective; the earlier one of a tie."""
    usable = [r for r in results if r.state == "COMPLETE" and r.objective is not None and r.kind != "confirm"]
    return min(usable, key=lambda r: (r.objective or 0.0, r.number), default=None)


def gains(best: Measurement, results: Sequence[TrialResult]) -> tuple[Gain, ...]:
    """The best load against every load of every baseline, by label and concurrency.

    The interval is that of the paired difference: both met the same lengths.
    """
    found = []
    for result in results:
        if result.kind != "baseline":
            continue
        label = result.label or f"trial {result.number}"
        if not result.loads:
            found.append(Gain(baseline=label, ratio=None, low=None, high=None))
        for load in result.loads:
            found.append(_gain(f"{label} at {load.concurrency} in flight", best, load))
    return tuple(found)


def _gain(label: str, best: Measurement, load: Measurement) -> Gain:
    found = ratio(best, load) if load.valid else None
    middle, low, high = (None, None, None) if found is None else found
    return Gain(baseline=label, ratio=middle, low=low, high=high)


def winner_record(
    spec: StudySpec,
    study: str,
    results: Sequence[TrialResult],
    *,
    verdict: Verdict,
    why: str,
    settles: str | None,
    forecast: Forecast | None = None,
    fingerprints: Mapping[str, str] | None = None,
    gpus: str | None = None,
) -> Winner | None:
    """The winner so far; ``None`` while nothing was stable."""
    best = best_trial(results)
    if best is None or best.measurement is None:
        return None
    return Winner(
        study=study,
        verdict=verdict,
        why=why,
        trial=best.number,
        model=spec.model,
        settings=best.settings,
        fixed=spec.engine_spec().fixed,
        client=ClientSide(
            concurrency=best.measurement.concurrency,
            max_tokens=spec.workload.max_tokens,
            sampling=spec.workload.sampling,
            request_limit_s=request_limit_s(spec.workload.max_tokens),
        ),
        measurement=best.measurement,
        gains=gains(best.measurement, results),
        forecast=forecast,
        startup_s=best.startup_s,
        gpus=gpus or spec.gpus,
        vllm_command=spec.vllm_command,
        trials=len(results),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=best.versions,
        fingerprints={"study": spec.fingerprint, **(fingerprints or {})},
        argv=best.argv,
        resolved=best.resolved,
        settles=settles,
        notes=best.notes,
    )
