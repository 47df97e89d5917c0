"""What a study found, as rows, Markdown and JSON; from records only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.records.codec import encode
from autotune.records.forecast import Forecast
from autotune.records.trial import TrialResult
from autotune.records.winner import Gain, Winner

COLUMNS = ("trial", "kind", "state", "settings", "in flight", "tokens/s", "95 %", "KV", "preempt.", "start s", "why")


def trial_rows(results: Sequence[TrialResult]) -> list[tuple[str, ...]]:
    """One row a trial, in the order of ``COLUMNS``."""
    return [_row(result) for result in results]


def _row(result: TrialResult) -> tuple[str, ...]:
    load = result.measurement or (result.loads[-1] if result.loads else None)
    rate = None if load is None else load.output_tokens_per_s
    interval = "" if load is None or load.paired_low is None else f"{load.paired_low:,.0f}-{load.paired_high or 0:,.0f}"
    return (
        str(result.number),
        result.label or result.kind,
        result.state,
        str(result.settings),
        "" if load is None else str(load.concurrency),
        "" if rate is None else f"{rate:,.0f}",
        interval,
        "" if load is None or load.kv_usage_max is None else f"{load.kv_usage_max:.0%}",
        "" if load is None or load.preemptions is None else str(load.preemptions),
        "" if result.startup_s is None else f"{result.startup_s:.0f}",
        why(result),
    )


def why(result: TrialResult) -> str:
    """In a few words: what limits a good trial, what ended a bad one."""
    if result.failure is not None:
        return f"{result.failure.kind}: {result.failure.line[:80]}"
    best = result.measurement
    if best is not None:
        return "" if best.bottleneck is None else f"{best.bottleneck.kind}: {best.bottleneck.evidence}"
    if not result.loads:
        return ""
    last = result.loads[-1]
    broken = [f"{name} +{value:.2g}" for name, value in last.violations.items() if value > 0]
    return "; ".join([*last.invalid_reasons, *broken]) or last.outcome


def gain_text(gain: Gain) -> str:
    """``vLLM defaults at 8 in flight: 1.62x (1.55-1.70)``."""
    if gain.ratio is None:
        return f"{gain.baseline}: could not be measured"
    interval = "" if gain.low is None or gain.high is None else f" ({gain.low:.2f}-{gain.high:.2f})"
    return f"{gain.baseline}: {gain.ratio:.2f}x{interval}"


def forecast_text(forecast: Forecast) -> str:
    """``2,158 requests: 41 min (36-47 min)``."""
    middle, low, high = (seconds / 60 for seconds in (forecast.makespan_s, forecast.low_s, forecast.high_s))
    return (
        f"{forecast.requests:,} requests: {middle:,.0f} min ({low:,.0f}-{high:,.0f} min at {forecast.level:.0%}), "
        f"after a start of {forecast.startup_s:,.0f} s"
    )


def markdown(study: str, results: Sequence[TrialResult], winner: Winner | None) -> str:
    """The report as Markdown."""
    lines = [f"# {study}", ""]
    if winner is None:
        lines += ["No stable trial so far.", ""]
    else:
        rate = winner.measurement.output_tokens_per_s or 0.0
        lines += [
            f"**{winner.verdict}**: trial {winner.trial}, {winner.settings}, {winner.client.concurrency} in flight: "
            f"{rate:,.0f} output tokens/s. {winner.why}.",
            "",
            *(f"- against {gain_text(gain)}" for gain in winner.gains),
        ]
        lines += [f"- {note}" for note in winner.notes]
        if winner.forecast is not None:
            lines.append(f"- forecast: {forecast_text(winner.forecast)}")
            lines += [f"- not known: {limit}" for limit in winner.forecast.limits]
        if winner.settles is not None and winner.verdict != "winner":
            lines.append(f"- what would settle it: {winner.settles}")
        lines.append("")
    lines.append("| " + " | ".join(COLUMNS) + " |")
    lines.append("|" + "---|" * len(COLUMNS))
    for row in trial_rows(results):
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def report_data(study: str, results: Sequence[TrialResult], winner: Winner | None) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "schema": "autotune/report/1",
        "study": study,
        "winner": encode(winner),
        "trials": [encode(result) for result in results],
    }
