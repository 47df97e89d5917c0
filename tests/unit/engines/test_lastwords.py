from __future__ import annotations

import pytest

from autotune.engines import lastwords as words


@pytest.mark.parametrize(
    "text",
    [
        "vLLM API server version 0.6.3.post1",
        "vLLM server version 0.33.0, serving model m",
        " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.16.0",
        "  �� version 0.23.1rc1.dev1201+gd08eebad1.d20260717",
    ],
)
def test_banners(text: str) -> None:
    assert words.BANNER.match(text)


@pytest.mark.parametrize("text", ["Python version 3.12.1", "Using FA version 2", "version", "  █▄█▀ █  model   m"])
def test_no_banners(text: str) -> None:
    assert not words.BANNER.match(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: x",
        "torch.cuda.OutOfMemoryError: CUDA out of memory",
        "AssertionError",
        "triton.runtime.errors.OutOfResources: out of resource",
        "Value error, x",
        "[Errno 98] error while attempting to bind",
    ],
)
def test_exceptions(text: str) -> None:
    assert words.EXCEPTION.match(text)


@pytest.mark.parametrize(
    "text", ["raise ValueError(x)", "an Error: x", "Traceback (most recent call last):", "Note: x"]
)
def test_no_exceptions(text: str) -> None:
    assert not words.EXCEPTION.match(text)


def test_hints() -> None:
    assert "dmesg" in words.death_hint("Worker proc 1 died unexpectedly (exit code: -9)")
    assert "without a word" in words.death_hint(
        "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
    )
    assert "kernel failed" in words.death_hint("CUDA error: device-side assert triggered")
    assert "less load" in words.death_hint("RuntimeError: x")
    assert "dmesg" in words.unknown_hint("Failed core proc(s): {'EngineCore': -9}")
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in words.unknown_hint("Timed out waiting for engine core processes to start")
    assert "reinstall" in words.unknown_hint("ModuleNotFoundError: No module named 'vllm'")
    assert "no known cause" in words.unknown_hint("AttributeError: x")
