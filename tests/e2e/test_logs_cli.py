"""``autotune log`` and ``autotune scrape`` as a user types them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.cli import logs as cli
from autotune.engines import scrape as engine_scrape
from autotune.errors import InputError, PrerequisiteError
from tests.unit.engines import server_logs
from tests.unit.engines import test_diagnosis as lives
from tests.unit.engines.test_scrape import V1, server

PAGE_KEYS = [
    "generation_tokens_total",
    "prompt_tokens_total",
    "kv_usage_max",
    "running",
    "waiting",
    "preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "engines",
]


def run(command: Any, *args: str | Path) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_log_as_json(tmp_path: Path) -> None:
    good = written(tmp_path, "good.log", server_logs.DP2_TP2)
    bad = written(tmp_path, "bad.log", "\n".join(lives.in_engine("torch.OutOfMemoryError: CUDA out of memory.")))
    result = run(cli.log, good, bad, "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["schema"], first["file"], first["samples"], first["failure"]) == (
        "autotune/log/1",
        str(good),
        6,
        None,
    )
    assert first["last"]["running"] == 6
    assert set(second["failure"]) == {"kind", "line", "hint"}
    assert second["failure"]["kind"] == "oom"
    assert second["last"] is None


def test_log_for_people(tmp_path: Path) -> None:
    good = written(tmp_path, "good.log", server_logs.CPU_033)
    bad = written(tmp_path, "bad.log", "\n".join((*lives.UP, *lives.READY, *lives.DEATH)))
    result = run(cli.log, good, bad)
    assert result.exit_code == 0
    assert "46,592 tokens" in result.stdout
    assert "33.3 tokens/s (prompt 1.5), 8 running, 5 waiting, KV use 87.5 %, 6 preemptions" in result.stdout
    assert "engine_died: torch.AcceleratorError" in result.stdout
    assert "hint" in result.stdout
    assert result.stderr == ""


def test_log_of_something_else(tmp_path: Path) -> None:
    result = run(cli.log, written(tmp_path, "x.txt", "hello\n"))
    assert result.exit_code == 0
    assert "no line of vLLM" in result.stderr
    assert "?" in result.stdout


def test_log_of_nothing(tmp_path: Path) -> None:
    result = run(cli.log, tmp_path / "none.log")
    assert isinstance(result.exception, InputError)
    assert result.exception.hint
    assert run(cli.log).exit_code == 2


def test_scrape_a_file(tmp_path: Path) -> None:
    page = written(tmp_path, "page.txt", V1)
    result = run(cli.scrape, page, "--json")
    data = json.loads(result.stdout)
    assert list(data) == ["schema", *PAGE_KEYS]
    assert (data["schema"], data["running"], data["engines"]) == ("autotune/scrape/1", 64, 2)
    people = run(cli.scrape, page)
    assert people.exit_code == 0
    assert "64" in people.stdout
    assert "50.0 %" in people.stdout


def test_scrape_a_server() -> None:
    with server(body=V1.encode()) as url:
        assert json.loads(run(cli.scrape, f"http://{url}/v1", "--json").stdout)["running"] == 64
        assert json.loads(run(cli.scrape, url, "--json").stdout)["running"] == 64


def test_scrape_an_empty_page(tmp_path: Path) -> None:
    result = run(cli.scrape, written(tmp_path, "page.txt", ""), "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert all(data[key] is None for key in PAGE_KEYS)
    assert "no metrics" in result.stderr


def test_scrape_another_service(tmp_path: Path) -> None:
    page = written(tmp_path, "page.txt", 'http_requests_total{handler="/"} 1.0\n')
    result = run(cli.scrape, page, "--json")
    assert isinstance(result.exception, InputError)
    assert "not a vLLM server" in result.exception.message
    assert "--disable-log-stats" in (result.exception.hint or "")
    assert result.stdout == ""


@pytest.mark.parametrize("source", ["127.0.0.1:1", "http://127.0.0.1:1/metrics", "none.txt", "ftp://x:1/y"])
def test_scrape_nobody(source: str) -> None:
    result = run(cli.scrape, source, "--timeout", "2s")
    assert isinstance(result.exception, InputError)
    assert result.exception.hint


def test_scrape_again_and_again_into_a_file(tmp_path: Path) -> None:
    out = written(tmp_path, "load.jsonl", '{"t": 1}\n')
    before = time.time()
    with server(body=V1.encode()) as url:
        result = run(cli.scrape, url, "--every", "0.01", "--count", "3", "--write", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "3 readings" in result.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0] == {"t": 1}
    assert [list(line) for line in lines[1:]] == [["schema", "t", *PAGE_KEYS]] * 3
    assert before - 1 < lines[1]["t"] < lines[3]["t"] < time.time() + 1


def test_scrape_again_and_again_to_the_terminal(tmp_path: Path) -> None:
    page = written(tmp_path, "page.txt", V1)
    people = run(cli.scrape, page, "--every", "0.01", "--count", "2")
    assert people.stdout.count("64 running, 4 waiting, KV use 50.0 %") == 2
    lines = run(cli.scrape, page, "--count", "2", "--every", "0.01", "--json").stdout.splitlines()
    assert [json.loads(line)["running"] for line in lines] == [64, 64]


def test_one_reading_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "load.jsonl"
    assert run(cli.scrape, written(tmp_path, "page.txt", V1), "--write", out).exit_code == 0
    assert len(out.read_text().splitlines()) == 1


def test_a_server_that_goes_away_is_noted_and_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([V1, V1, None, V1])

    def fetch(url: str, timeout: float) -> str:
        page = next(pages)
        if page is None:
            raise InputError("gone")
        return page

    monkeypatch.setattr(cli, "fetch", fetch)
    out = tmp_path / "load.jsonl"
    result = run(cli.scrape, "h:1", "--every", "0.01", "--count", "3", "--write", out)
    assert result.exit_code == 0
    assert "gone" in result.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["running"] for line in lines] == [64, None, 64]
    assert [line.get("error") for line in lines] == [None, "gone", None]
    assert list(lines[1]) == ["schema", "t", *PAGE_KEYS, "error"]


def test_ctrl_c_ends_it_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_scrape.time, "sleep", interrupt)
    out = tmp_path / "load.jsonl"
    result = run(cli.scrape, written(tmp_path, "page.txt", V1), "--every", "1s", "--write", out)
    assert result.exit_code == 0
    assert "1 readings" in result.stderr
    assert len(out.read_text().splitlines()) == 1


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = run(cli.scrape, written(tmp_path, "page.txt", V1), "--write", tmp_path / "no" / "x.jsonl")
    assert isinstance(result.exception, PrerequisiteError)
    assert result.exception.hint


@pytest.mark.parametrize("value", ["0", "-1s", "soon"])
def test_bad_periods(tmp_path: Path, value: str) -> None:
    assert run(cli.scrape, written(tmp_path, "page.txt", V1), "--every", value).exit_code == 2


def test_help_shows_examples() -> None:
    for command in (cli.log, cli.scrape):
        assert "autotune " in run(command, "--help").output
