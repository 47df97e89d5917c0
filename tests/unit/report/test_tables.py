from __future__ import annotations

import json
from dataclasses import replace

from autotune.records.forecast import Forecast
from autotune.records.measurement import Bottleneck
from autotune.records.observation import Failure
from autotune.records.settings import Settings
from autotune.report.tables import COLUMNS, gain_text, markdown, report_data, trial_rows, why
from tests.unit.apply.winners import WINNER
from tests.unit.search.results import load, result

FORECAST = Forecast(
    requests=2158,
    makespan_s=2460.0,
    low_s=2160.0,
    high_s=2820.0,
    level=0.95,
    startup_s=120.0,
    output_tokens_per_s=8000.0,
    tail_share=0.1,
    truncated_share=0.2,
    length_source="probe",
    limits=("prefix hits",),
)


def test_the_markdown_holds_winner_gains_and_every_trial() -> None:
    trials = [result(0, 800.0, kind="baseline", label="vLLM defaults"), result(1, None), result(2, 1234.0)]
    text = markdown("s", trials, replace(WINNER, forecast=FORECAST))
    assert "**unconfirmed**: trial 3" in text
    assert "1.62x (1.55-1.70)" in text
    assert "yours: could not be measured" in text
    assert "2,158 requests: 41 min (36-47 min at 95%)" in text
    assert "not known: prefix hits" in text
    assert "what would settle it: repeat it" in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(trials)
    assert all(line.count(" | ") == len(COLUMNS) - 1 for line in table)
    assert "kv_too_small: too small" in table[2]


def test_no_winner_is_said_and_pipes_are_escaped() -> None:
    text = markdown("s", [result(0, 5.0, settings=Settings(x="a|b"))], None)
    assert "No stable trial so far." in text
    assert "a\\|b" in text


def test_every_row_has_every_column() -> None:
    rows = trial_rows([result(0, None), result(1, 10.0), result(2, None, startup_s=None, failure=None)])
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert rows[1][5] == "10"
    assert rows[1][6] == "10-10"


def test_why_names_limit_failure_or_broken_rule() -> None:
    assert why(result(0, 5.0)) == ""
    limited = load(8, 5.0, bottleneck=Bottleneck(kind="kv", evidence="KV 97 %"))
    assert why(result(0, 5.0, loads=(limited,))) == "kv: KV 97 %"
    assert why(result(0, None, failure=Failure(kind="oom", line="CUDA out of memory"))) == "oom: CUDA out of memory"
    broken = load(8, None, outcome="saturated", stable=False, violations={"preemptions": 0.5, "drift": -0.1})
    assert why(result(0, None, failure=None, loads=(broken,))) == "preemptions +0.5"
    invalid = load(8, None, outcome="invalid", invalid_reasons=("in flight short",), violations={})
    assert why(result(0, None, failure=None, loads=(invalid,))) == "in flight short"
    assert (
        why(result(0, None, failure=None, loads=(load(8, None, outcome="not_settled", violations={}),)))
        == "not_settled"
    )
    assert gain_text(replace(WINNER.gains[0], low=None)) == "vLLM defaults at 8 in flight: 1.62x"


def test_the_json_is_plain_data() -> None:
    data = json.loads(json.dumps(report_data("s", [result(0, 5.0)], WINNER), allow_nan=False))
    assert data["schema"] == "autotune/report/1"
    assert data["winner"]["schema"] == "autotune/winner/1"
    assert data["trials"][0]["number"] == 0
    assert report_data("s", [], None)["winner"] is None
