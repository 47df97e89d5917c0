"""Starts: refused in vLLM's words, and dearer when nothing was compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.engines.sim import SimWorld
from autotune.engines.sim.starts import STARTS_FILE, Starts
from autotune.errors import LaunchFailed
from autotune.physics.gpus import GIB
from autotune.records.settings import Settings
from tests.unit.engines.sim.machines import engine


def started(settings: Settings, folder: Path | None = None, **changes: object) -> float:
    made = engine(SimWorld(1), folder=folder, **changes)
    with made.session(settings) as session:
        return session.startup_s


def refused(settings: Settings, **changes: object) -> LaunchFailed:
    made = engine(SimWorld(1), **changes)
    with pytest.raises(LaunchFailed) as caught, made.session(settings):
        pass
    assert made.now() == caught.value.seconds > 0
    return caught.value


@pytest.mark.parametrize(
    ("flags", "kind", "hint"),
    [
        ({"tensor_parallel_size": 3}, "tp_not_divisible", "must divide 64"),
        ({"tensor_parallel_size": 16}, "not_enough_gpus", "16 GPUs wanted, 8 there"),
        ({"tensor_parallel_size": 4, "data_parallel_size": 4}, "not_enough_gpus", "fewer GPUs"),
        ({"max_model_len": 99_999}, "max_model_len_too_long", "at most 40960"),
        ({"max_num_seqs": 4096, "max_num_batched_tokens": 512}, "bad_flag", "at least 4096"),
        ({"enable_expert_parallel": True}, "unsupported", ""),
        ({"pipeline_parallel_size": 8, "decode_context_parallel_size": 4}, "bad_flag", ""),
        ({"gpu_memory_utilization": 0.45}, "no_kv_memory", "raise it"),
        ({"gpu_memory_utilization": 0.5}, "kv_too_small", "lower max_model_len from 40960 to at most"),
    ],
)
def test_what_vllm_would_refuse(flags: dict[str, object], kind: str, hint: str) -> None:
    failure = refused(Settings(flags)).failure
    assert failure.kind == kind
    assert failure.line
    assert hint in (failure.hint or "")


def test_the_hint_of_a_small_cache_is_true() -> None:
    hint = refused(Settings(gpu_memory_utilization=0.5)).failure.hint or ""
    longest = int(hint.split("at most ")[1].split(",")[0])
    assert started(Settings(gpu_memory_utilization=0.5, max_model_len=longest)) > 0
    refused(Settings(gpu_memory_utilization=0.5, max_model_len=longest + 16))


def test_other_sizes_that_do_not_divide() -> None:
    # 64 query heads divide by 32, the 8-bit blocks of the feed-forward layers do not
    failure = refused(Settings(tensor_parallel_size=32), model="Qwen/Qwen3-32B-FP8", gpus="32xH200").failure
    assert failure.kind == "tp_not_divisible"


def test_weights_that_do_not_fit_are_out_of_memory() -> None:
    assert refused(Settings(), gpus="RTX4090").failure.kind == "oom"


def test_memory_held_by_others_is_busy() -> None:
    made = engine(SimWorld(1))
    made.hardware = made.hardware.with_used(40 * GIB)
    with pytest.raises(LaunchFailed) as caught, made.session(Settings()):
        pass
    assert caught.value.failure.kind == "gpu_busy"


def test_a_second_start_of_the_same_code_is_warm(tmp_path: Path) -> None:
    folders = [tmp_path / "attempts" / f"{n:04d}" for n in range(4)]
    cold = started(Settings(max_num_seqs=64), folders[0])
    warm = started(Settings(max_num_seqs=64, gpu_memory_utilization=0.9), folders[1])
    other = started(Settings(max_num_seqs=128), folders[2])
    assert warm < 0.75 * cold
    assert other > 1.25 * warm
    assert started(Settings(max_num_seqs=128), folders[3]) < 0.75 * other


def test_starts_are_counted_across_runs_and_differ_by_noise(tmp_path: Path) -> None:
    for n in range(3):
        number, warm = Starts(tmp_path / f"{n:04d}").add(Settings(max_num_seqs=8), ("key",))
        assert (number, warm) == (n, n > 0)
    assert Starts(tmp_path / "0003").add(Settings(max_num_seqs=9), ("key",)) == (0, True)
    assert (tmp_path / "0003" / STARTS_FILE).read_text().count("\n") == 1
    again = {started(Settings(), tmp_path / "x" / f"{n}") for n in range(3)}
    assert len(again) == 3


def test_without_a_folder_an_engine_knows_its_own_starts() -> None:
    made = engine(SimWorld(1))
    seconds = []
    for _ in range(2):
        with made.session(Settings()) as session:
            seconds.append(session.startup_s)
    assert seconds[1] < 0.75 * seconds[0]
