"""The table of cards and the spellings by which people name them."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.physics.gpus import GIB, GPUS, parse_gpus


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xH200", "8xH200"),
        ("8x H200", "8xH200"),
        ("8 H200", "8xH200"),
        ("8×H200", "8xH200"),
        ("H200 x8", "8xH200"),
        ("H200:8", "8xH200"),
        ("h200", "1xH200"),
        ("NVIDIA H200", "1xH200"),
        ("H100-80GB-SXM", "1xH100"),
        ("NVIDIA H100 80GB HBM3", "1xH100"),
        ("8*NVIDIA H100 80GB HBM3", "8xH100"),
        ("NVIDIA H100 PCIe", "1xH100 PCIe"),
        ("H100 NVL", "1xH100 NVL"),
        ("a100", "1xA100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "1xA100-40GB"),
        ("NVIDIA A100 80GB PCIe", "1xA100-80GB"),
        ("4xL40S", "4xL40S"),
        ("4xL4", "4xL4"),
        ("NVIDIA A10G", "1xA10G"),
        ("B200", "1xB200"),
        ("AMD Instinct MI300X OAM", "1xMI300X"),
        ("2*RTX4090", "2xRTX 4090"),
        ("4090", "1xRTX 4090"),
        ("5090 x2", "2xRTX 5090"),
        ("NVIDIA GeForce RTX 5090", "1xRTX 5090"),
        ("RTX PRO 6000", "1xRTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "1xRTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "1xRTX 6000 Ada"),
        ("Tesla T4", "1xT4"),
        ("cpu", "1xCPU"),
    ],
)
def test_spellings(text: str, name: str) -> None:
    assert parse_gpus(text).name == name


def test_every_card_is_found_by_its_own_name() -> None:
    for name in GPUS:
        assert parse_gpus(f"2x{name}").name == f"2x{name}"


def test_unknown_card_names_near_ones() -> None:
    with pytest.raises(InputError, match="unknown GPU 'H2000'") as caught:
        parse_gpus("8xH2000")
    assert caught.value.hint is not None
    assert "H200" in caught.value.hint
    with pytest.raises(InputError, match="known are"):
        parse_gpus("toaster")


@pytest.mark.parametrize("text", ["", "8x", "0xH200", "-1xH200", "x", "8"])
def test_what_is_no_hardware(text: str) -> None:
    with pytest.raises(InputError):
        parse_gpus(text)


def test_measured_figures_of_the_h200() -> None:
    h200 = GPUS["H200"]
    assert h200.memory_bytes / GIB == pytest.approx(139.8)
    assert h200.bandwidth_bytes_per_s == 4.3e12
    assert h200.bf16_flops_per_s == 790e12
    assert "measured" in h200.source


def test_figures_are_plausible_and_have_a_source() -> None:
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.fp8_flops_per_s >= gpu.bf16_flops_per_s
        assert 1e9 < gpu.link_bytes_per_s < gpu.bandwidth_bytes_per_s
        assert 8 * GIB < gpu.memory_bytes < 300 * GIB
        assert 0 < gpu.all_reduce_s < 1e-3


def test_overrides() -> None:
    hardware = parse_gpus("2xRTX 4090")
    assert hardware.with_memory(48 * GIB).free_bytes == 48 * GIB
    assert hardware.with_used(2 * GIB).free_bytes == hardware.gpu.memory_bytes - 2 * GIB
    assert hardware.with_used(100 * GIB).free_bytes == 0
    assert hardware.with_count(8).name == "8xRTX 4090"
    assert parse_gpus("cpu").gpu.is_cpu
