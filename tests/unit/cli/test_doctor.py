from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.doctor import doctor
from autotune.engines import doctor as checks
from autotune.engines.doctor import Check, Report
from autotune.errors import PrerequisiteError

FINE = Check(name="driver", status="ok", text="NVIDIA 570.1")
ABSENT = Check(name="vllm", status="missing", text="'vllm' is not installed here", hint="pip install it")


def run(monkeypatch: pytest.MonkeyPatch, *args: str, found: tuple[Check, ...]) -> tuple[Any, dict[str, Any]]:
    asked: dict[str, Any] = {}

    def examine(command: str, studies: Path, **more: Any) -> Report:
        asked.update(more, command=command, studies=studies)
        return Report(can_search=ABSENT not in found, checks=found, ceiling=None)

    monkeypatch.setattr(checks, "examine", examine)
    return CliRunner().invoke(doctor, args), asked


def test_a_line_each_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run(monkeypatch, "--vllm-command", "my vllm", "--studies", "there", found=(FINE,))
    assert result.exit_code == 0
    assert result.output == "ok      driver              NVIDIA 570.1\n"
    assert (asked["command"], asked["studies"], asked["clean"], asked["load"]) == (
        "my vllm",
        Path("there"),
        False,
        True,
    )
    assert 0 < asked["cpu_limit"] < 1
    assert asked["lag_limit_s"] > 0


def test_what_is_missing_is_a_prerequisite(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run(monkeypatch, "--clean", "--no-load", found=(FINE, ABSENT))
    assert isinstance(result.exception, PrerequisiteError)
    assert result.exception.exit_code == 2
    assert "could not start: vllm" in str(result.exception)
    assert "-> pip install it" in result.output
    assert (asked["clean"], asked["load"]) == (True, False)


def test_json_comes_first_whatever_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, "--json", found=(ABSENT,))
    data = json.loads(result.stdout)
    assert (data["schema"], data["can_search"]) == ("autotune/doctor/1", False)
    assert data["checks"][0]["status"] == "missing"
    assert isinstance(result.exception, PrerequisiteError)
