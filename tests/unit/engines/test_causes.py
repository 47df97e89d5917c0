from __future__ import annotations

from autotune.engines.causes import Cause, failed, of_death, of_start
from autotune.engines.logline import parse
from autotune.records.observation import FailureKind


def cause(text: str, kind: FailureKind | None = None, rank: int = 0, *, outlived: bool = False) -> Cause:
    (line,) = parse(text)
    return Cause(line, kind, "do this", rank, solid=True, in_flight=True, outlived=outlived)


CORE, API = "(EngineCore pid=8) ", "(APIServer pid=7) "


def test_a_start_takes_ours_then_known_then_exact_then_first() -> None:
    foreign = cause("OSError: a", "port_in_use")
    unknown = cause(f"{CORE}ValueError: b")
    vague = cause(f"{CORE}ValueError: c", "nccl", 1)
    exact = cause(f"{CORE}ValueError: d", "oom")
    later = cause(f"{CORE}ValueError: e", "gpu_busy")
    assert of_start([foreign, unknown, vague, exact, later], named=True) is exact
    assert of_start([foreign, unknown, vague], named=True) is vague
    assert of_start([foreign, unknown], named=True) is unknown
    assert of_start([foreign, unknown], named=False) is foreign
    assert of_start([], named=True) is None


def test_what_vllm_outlived_is_doubtful_unless_it_said_so() -> None:
    assert cause("OSError: a", "port_in_use", outlived=True).doubtful
    assert not cause(f"{CORE}OSError: a", "port_in_use", outlived=True).doubtful
    assert not cause("ERROR 10-09 12:00:00 [x.py:1] OSError: a", "port_in_use", outlived=True).doubtful


def test_a_death_takes_what_engines_said() -> None:
    api = cause(f"{API}ValueError: request", "oom")
    bare = cause("ValueError: foreign", "oom")
    request = cause("ERROR 10-09 12:00:00 [serving_chat.py:1] ValueError: x", "oom")
    first = cause(f"{CORE}ValueError: first")
    vague = cause(f"{CORE}ValueError: follows", "nccl", 1)
    exact = cause(f"{CORE}ValueError: exact", "oom")
    assert of_death([api, bare, request], named=True) is None
    assert of_death([api, bare, first, vague], named=True) is first
    assert of_death([first, vague, exact], named=True) is exact
    assert of_death([request, bare], named=False) is bare


def test_as_a_failure() -> None:
    failure = cause(f"{CORE}ValueError: x", "oom").failure()
    assert (failure.kind, failure.line, failure.hint) == ("oom", "ValueError: x", "do this")
    assert cause(f"{CORE}ValueError: x").failure().kind == "unknown"
    assert len(failed("oom", "x" * 999, "h").line) == 300
