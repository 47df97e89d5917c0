from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines.logline import LINE_LIMIT, LogLine, parse, shorten, unbroken


def one(raw: bytes | str) -> LogLine:
    (line,) = parse(raw)
    return line


HEADS = {
    "V0": ("INFO 10-28 11:16:34 metrics.py:349] hello", "metrics.py", ()),
    "0.8": ("INFO 10-28 11:16:34 [metrics.py:486] hello", "metrics.py", ()),
    "0.10.1": ("(APIServer pid=9) INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ("APIServer pid=9",)),
    "0.11": (
        "\x1b[1;36m(EngineCore_DP0 pid=9)\x1b[0;0m INFO 10-28 11:16:34 [x.py:1] hello",
        "x.py",
        ("EngineCore_DP0 pid=9",),
    ),
    "rank": ("(VllmWorker rank=1 pid=7) INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ("VllmWorker rank=1 pid=7",)),
    "space": ("(VllmWorker TP1 pid=7) INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ("VllmWorker TP1 pid=7",)),
    "debug path": ("INFO 10-28 11:16:34 [v1/.../sched/scheduler.py:12] hello", "v1/.../sched/scheduler.py", ()),
    "colours": ("\x1b[32mINFO\x1b[0m \x1b[90m10-28 11:16:34\x1b[0m \x1b[90m[x.py:1]\x1b[0m hello", "x.py", ()),
    "milliseconds": ("INFO 10-28 11:16:34.123 [x.py:1] hello", "x.py", ()),
    "ray": (
        "\x1b[36m(Srv pid=5, ip=10.0.0.2)\x1b[0m (EngineCore_DP0 pid=9) INFO 10-28 11:16:34 [x.py:1] hello",
        "x.py",
        ("Srv pid=5", "EngineCore_DP0 pid=9"),
    ),
    "journald": ("Apr 11 19:21:34 h vllm[1]: INFO 10-28 11:16:34 x.py:1] hello", "x.py", ()),
    "kubernetes": ("2025-10-28T11:16:34.1Z stdout F INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ()),
    "progress bar": ("Loading:  50%|##   | 1/2 [00:01<00:01]INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ()),
    "own prefix": ("[gpu7] INFO 10-28 11:16:34 [x.py:1] hello", "x.py", ()),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: str) -> None:
    text, file, procs = HEADS[case]
    line = one(text)
    assert (line.text, line.level, line.stamp, line.file) == ("hello", "INFO", "10-28 11:16:34", file)
    assert line.procs == procs
    assert line.ours


HEADLESS = {
    "bare": ("RuntimeError: x", None, "RuntimeError: x"),
    "uvicorn": ("INFO:     Application startup complete.", "INFO", "Application startup complete."),
    "uvicorn error": ("ERROR:    [Errno 98] in use", "ERROR", "[Errno 98] in use"),
    "process": ("(EngineCore_DP0 pid=9) RuntimeError: x", None, "RuntimeError: x"),
    "torch rank": ("[rank0]: RuntimeError: x", None, "RuntimeError: x"),
    "glog": ("[rank0]:[W1009 13:00:00.37 ProcessGroupNCCL.cpp:1538] careful", "WARNING", "careful"),
    "glog process": ("(Worker pid=1) [rank2]:E0716 18:21:22.79 1 torch/x.py:874] OSError: x", "ERROR", "OSError: x"),
    "old glog": (
        "[E ProcessGroupNCCL.cpp:489] Some NCCL operations have failed",
        "ERROR",
        "Some NCCL operations have failed",
    ),
    "brackets": ("[ERROR] 2025-05-06 x", "ERROR", "2025-05-06 x"),
    "std logging": ("2025-05-06 01:02:03,123 - vllm.engine - ERROR - broken", "ERROR", "broken"),
    "basicConfig": ("WARNING:root:careful", "WARNING", "careful"),
    "loguru": ("2025-05-06 01:02:03.123 | ERROR    | app:run:3 - broken", "ERROR", "app:run:3 - broken"),
    "compose": ("vllm-1  | RuntimeError: x", None, "RuntimeError: x"),
    "srun": ("3: RuntimeError: x", None, "RuntimeError: x"),
    "torchrun": ("[default0]:RuntimeError: x", None, "RuntimeError: x"),
    "mpirun": ("[1,0]<stderr>:RuntimeError: x", None, "RuntimeError: x"),
    "time zone": ("2025-10-28 11:16:34.123+02:00 RuntimeError: x", None, "RuntimeError: x"),
    "short-iso journal": ("2025-10-28T11:16:34+0200 host1 vllm[9]: RuntimeError: x", None, "RuntimeError: x"),
    "docker desktop": ("2025-04-29 21:56:20.933 | RuntimeError: x", None, "RuntimeError: x"),
    "swarm": ("vllm.1.abc@node2    | RuntimeError: x", None, "RuntimeError: x"),
    "pm2": ("0|vllm  | RuntimeError: x", None, "RuntimeError: x"),
    "several": ("vllm-1  | 2025-10-28T11:16:34Z (Worker pid=1) RuntimeError: x", None, "RuntimeError: x"),
}


@pytest.mark.parametrize("case", HEADLESS)
def test_lines_without_head(case: str) -> None:
    text, level, message = HEADLESS[case]
    line = one(text)
    assert (line.level, line.text, line.stamp) == (level, message, None)


def test_who_wrote_it() -> None:
    assert one("(APIServer pid=1) x").front.from_api
    assert one("(ApiServer_3 pid=1) x").front.from_api
    assert one("(APIServer_DP1 pid=1) x").front.from_api
    assert one("(EngineCore pid=1) x").front.from_engine
    assert one("(Worker_TP0_EP0 pid=1) x").front.from_engine
    assert one("(RayWorkerWrapper pid=1, ip=10.0.0.3) x").front.from_engine
    stranger = one("(TrainActor pid=1) x")
    assert not stranger.front.from_api
    assert not stranger.front.from_engine
    assert not stranger.ours


def test_services_are_named() -> None:
    assert one("vllm-1  | INFO 10-28 11:16:34 [x.py:1] hello").front.service == "vllm-1"
    assert one("[pod/vllm-0/server] INFO 10-28 11:16:34 [x.py:1] hello").front.service == "pod/vllm-0/server"
    assert one("vllm-1  | RuntimeError: x").front.service == "vllm-1"


def test_an_echoed_interrupt() -> None:
    assert one("^CERROR 10-28 11:16:34 [x.py:1] hello").front.interrupted
    assert one("^CTraceback").front.interrupted
    assert not one("^C").front.interrupted


def test_vllms_json_lines() -> None:
    record = {
        "asctime": "2026-10-28 11:16:34,123",
        "levelname": "ERROR",
        "name": "vllm.v1.engine.core",
        "processName": "EngineCore_DP0",
        "process": 80,
        "message": "EngineCore encountered a fatal error.",
        "exc_info": "Traceback (most recent call last):\n  File x\nRuntimeError: broken",
    }
    lines = list(parse(json.dumps(record)))
    assert [line.text for line in lines][0::3] == ["EngineCore encountered a fatal error.", "RuntimeError: broken"]
    assert {line.level for line in lines} == {"ERROR"}
    assert {line.stamp for line in lines} == {"10-28 11:16:34"}
    assert all(line.front.from_engine for line in lines)


def test_docker_and_journald_json() -> None:
    inner = "\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 10-28 11:16:34 [x.py:1] hello\n"
    for key in ("log", "MESSAGE", "msg"):
        line = one(json.dumps({key: inner, "stream": "stdout", "time": "2025-10-28T11:16:34Z"}))
        assert (line.text, line.stamp, line.front.from_api) == ("hello", "10-28 11:16:34", True)
    line = one("vllm-1  | " + json.dumps({"message": "RuntimeError: x", "severity": "error"}))
    assert (line.text, line.level, line.front.service) == ("RuntimeError: x", "ERROR", "vllm-1")


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"message": 3}', "{broken}", '{"message": "x"', "[1]", '{"m":' * 300 + "}"]
)
def test_other_json_is_text(text: str) -> None:
    assert one(text).text == text


def test_lines_are_unbroken() -> None:
    assert unbroken(b"a\r\nb\rc\n") == b"a\n\nb\nc\n"
    assert unbroken(b"a" + b"\0" * 500 + b"b\n") == b"a\nb\n"
    assert unbroken("héllo\n".encode("utf-16-le").replace(b"\xe9\x00", b"e\0")) == b"hello\n"


def test_unfinished_lines_stay_small() -> None:
    assert shorten(b"abc") == b"abc"
    assert shorten(b"\0" * (3 * LINE_LIMIT) + b"abc") == b"\0\0abc"
    assert len(shorten(b"x" * (3 * LINE_LIMIT))) == LINE_LIMIT
    assert len(one(b"x" * (3 * LINE_LIMIT)).text) == LINE_LIMIT


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
@settings(max_examples=50, deadline=None)
def test_never_raises(raw: bytes | str) -> None:
    for line in parse(raw):
        assert "\x1b[" not in line.text
