from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines.diagnosis import diagnose
from autotune.engines.logline import LINE_LIMIT
from autotune.engines.serverlog import LogReader, iter_samples, read_log
from autotune.errors import InputError
from autotune.records.codec import dumps, encode
from tests.unit.engines import server_logs as logs
from tests.unit.engines import test_diagnosis as lives

SHAPES = {
    name: text
    for name, text in vars(logs).items()
    if name.isupper() and isinstance(text, str) and name not in ("API", "CORE")
}


def read(text: str | bytes) -> LogReader:
    reader = LogReader()
    reader.feed(text.encode() if isinstance(text, str) else text)
    reader.close()
    return reader


def summary(text: str | bytes) -> dict[str, Any]:
    data: dict[str, Any] = encode(read(text).summary("server.log"))
    return data


LAST = {
    "prompt_tokens_per_s": 10.0,
    "output_tokens_per_s": 100.0,
    "running": 3,
    "waiting": 2,
    "kv_usage": 0.01,
    "prefix_hit_rate": 0.4,
    "preemptions": None,
}
# version, samples, engines, KV tokens, peak, largest KV use, part of last
EXPECTED: dict[str, tuple[str | None, int, int, int | None, float | None, float | None, dict[str, Any] | None]] = {
    "V0_JOURNALD": ("0.4.1", 1, 1, 1600, 2.8, 0.025, {"waiting": 7, "kv_usage": 0.025, "prefix_hit_rate": 0.125}),
    "TP2": ("0.11.0", 1, 1, 1984, 100.0, 0.01, LAST),
    "UNNAMED_TP4": ("0.11.0", 1, 1, 1984, 100.0, 0.01, LAST),
    "UNNAMED_DP2": ("0.11.0", 2, 2, 3000, 30.5, 0.075, {"output_tokens_per_s": 30.5, "running": 6, "kv_usage": 0.075}),
    "DP2_TP2": ("0.11.0", 6, 2, 4984, 104.0, 0.01, {**LAST, "output_tokens_per_s": 104.0, "running": 6, "waiting": 4,
                                                    "prompt_tokens_per_s": 20.0}),
    "CPU_033": ("0.33.0", 1, 1, 46592, 33.3, 0.875, {"waiting": 5, "preemptions": 6, "prefix_hit_rate": None}),
    "AGGREGATED": ("0.30.0", 1, 4, None, 400.0, 0.01, {**LAST, "output_tokens_per_s": 400.0}),
    "JSON_033": (None, 2, 1, None, 11.0, 0.01, {**LAST, "output_tokens_per_s": 11.0}),
    "DOCKER_JSON": ("0.11.0", 1, 1, 1984, 100.0, 0.01, LAST),
    "TWO_RUNS": ("0.20.1", 7, 1, 500, 104.0, 0.01, {**LAST, "output_tokens_per_s": 7.0}),
    "COMPOSE_PAIR": ("0.9.0", 3, 2, 3000, 20.0, 0.01, {"output_tokens_per_s": 31.0, "running": 6}),
    "RAY_PAIR": ("0.11.0", 0, 0, 572, None, None, None),
    "PROGRESS_BARS": (None, 2, 1, None, 100.0, 0.01, {"output_tokens_per_s": 90.0}),
}  # fmt: skip


def test_every_shape_has_its_values() -> None:
    assert EXPECTED.keys() == SHAPES.keys()


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    version, samples, engines, tokens, peak, kv_usage, last = EXPECTED[shape]
    got = summary(SHAPES[shape])
    assert got["vllm_version"] == version
    assert (got["samples"], got["engines"], got["kv_capacity_tokens"]) == (samples, engines, tokens)
    assert (got["peak_output_tokens_per_s"], got["max_kv_usage"]) == (peak, kv_usage)
    assert got["failure"] is None
    if last is None:
        assert got["last"] is None
    else:
        assert got["last"] is not None
        assert last.items() <= got["last"].items()


def test_the_record() -> None:
    got = summary(logs.TP2)
    assert list(got) == [
        "schema",
        "file",
        "vllm_version",
        "engines",
        "samples",
        "last",
        "peak_output_tokens_per_s",
        "max_kv_usage",
        "kv_capacity_tokens",
        "failure",
    ]
    assert got["schema"] == "autotune/log/1"
    assert list(got["last"]) == list(LAST)
    assert dumps(read("").summary("x"))


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunk_borders_do_not_matter(shape: str, size: int) -> None:
    data = SHAPES[shape].encode()
    reader = LogReader()
    found = []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    found += reader.close()
    assert encode(reader.summary("server.log")) == summary(data)
    assert len(found) == reader.samples


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n\n"])
def test_line_ends_do_not_matter(shape: str, ending: str) -> None:
    text = SHAPES[shape].replace("\r", "")
    assert summary(text.replace("\n", ending)) == summary(text)


@pytest.mark.parametrize("shape", [name for name in SHAPES if "JSON" not in name and name != "V0_JOURNALD"])
@pytest.mark.parametrize("front", [*lives.PREFIXES, "\x1b[36m(Srv pid=1)\x1b[0m "])
def test_prefixes_do_not_matter(shape: str, front: str) -> None:
    text = SHAPES[shape].replace("\r", "\n")
    prefixed = "\n".join(front + line for line in text.splitlines() if line)
    assert summary(prefixed) == summary(text)


def test_utf16_and_holes_of_nuls() -> None:
    expected = summary(logs.TP2)
    assert summary(b"\xff\xfe" + logs.TP2.encode("utf-16-le")) == expected
    lines = logs.TP2.encode().splitlines(keepends=True)
    assert summary(b"".join(lines[:3]) + b"\0" * 5000 + b"".join(lines[3:])) == expected


def test_a_hole_larger_than_any_line() -> None:
    reader = LogReader()
    for piece in (b"\0" * (LINE_LIMIT + 7), b"\0" * LINE_LIMIT, logs.stats("10-09 12:01:00").encode()[:40]):
        reader.feed(piece)
    reader.feed(logs.stats("10-09 12:01:00").encode()[40:] + b"\n")
    assert reader.samples == 1
    assert len(reader._rest) <= LINE_LIMIT


def test_a_line_without_end_stays_small() -> None:
    reader = LogReader()
    for _ in range(5):
        reader.feed(b"x" * LINE_LIMIT)
    assert len(reader._rest) <= LINE_LIMIT
    reader.feed(b"\n" + logs.stats("10-09 12:01:00").encode())
    assert reader.samples == 0
    assert len(reader.close()) == 1


def test_a_log_that_grows() -> None:
    reader = LogReader()
    lines = ["\n".join(part) + "\n" for part in (lives.UP, lives.READY, (logs.stats("10-09 12:01:00"),), lives.DEATH)]
    reader.feed(lines[0].encode())
    assert (reader.ready, reader.vllm_version, reader.failure()) == (False, "0.11.0", None)
    reader.feed(lines[1].encode())
    assert reader.ready
    assert reader.last is None
    (seen,) = reader.feed(lines[2].encode())
    assert seen.output_tokens_per_s == 100.0
    reader.feed(lines[3].encode())
    failure = reader.failure()
    assert failure is not None
    assert failure.kind == "engine_died"


def test_a_full_disk_is_unknown_to_the_log_and_known_to_a_trial() -> None:
    reader = read("\n".join(lives.in_engine("OSError: [Errno 28] No space left on device: '/x'")))
    failure = reader.failure()
    assert failure is not None
    assert failure.kind == "disk_full"
    told = reader.summary("x").failure
    assert told is not None
    assert (told.kind, told.line, told.hint) == ("unknown", failure.line, failure.hint)


@pytest.mark.parametrize("lines", [lines for _, lines in lives.CASES])
def test_the_reader_sees_what_a_reader_of_every_line_sees(lines: tuple[str, ...]) -> None:
    assert read("\n".join(lines)).failure() == diagnose(lines)
    assert read("\n".join(lines)).failure(exit_code=1, ready=False) == diagnose(lines, exit_code=1, ready=False)


def test_what_users_write_is_passed_over() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. " + logs.stats("10-09 12:01:00")
    line = f"{logs.API}INFO 10-09 12:00:00 [logger.py:41] Received request c-1: prompt: '{text * 20}', params: x"
    assert summary("\n".join((*lives.UP, *lives.READY, line)))["samples"] == 0


def test_a_stats_line_with_old_and_new_servers_numbers_them(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(logs.TWO_RUNS)
    samples = list(iter_samples(file))
    assert [line.server for line in samples] == [0] * 6 + [1]
    assert [line.t_s for line in samples] == [0, 0, 10, 10, 20, 20, 3840]
    assert [line.engine for line in samples[:2]] == [0, 1]
    assert read_log(file).file == str(file)


def test_the_new_year(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("\n".join(logs.stats(stamp) for stamp in ("12-31 23:59:55", "01-01 00:00:05", "01-01 00:00:15")))
    assert [line.t_s for line in iter_samples(file)] == [0, 10, 20]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.log", tmp_path):
        with pytest.raises(InputError, match="cannot read the log"):
            read_log(path)


@given(
    st.lists(
        st.one_of(st.sampled_from([*SHAPES.values(), "rror", "ERROR: ", "\x1b[", "{", "}"]), st.binary(max_size=60))
    )
)
@settings(max_examples=50, deadline=None)
def test_never_raises(parts: list[str | bytes]) -> None:
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    whole = summary(data)
    cut = LogReader()
    for start in range(0, len(data), 97):
        cut.feed(data[start : start + 97])
    cut.close()
    assert encode(cut.summary("server.log")) == whole
