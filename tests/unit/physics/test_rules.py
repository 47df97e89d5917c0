"""vLLM versions."""

from __future__ import annotations

from autotune.physics.rules import rules_for


def test_versions() -> None:
    assert rules_for("0.10.0").counts_nccl
    assert rules_for("v0.11.2").gpu_memory_utilization == 0.90
    assert not rules_for("0.17.1").counts_nccl
    assert rules_for("0.20.0").gpu_memory_utilization == 0.92
    assert not rules_for("0.20.0").counts_graphs
    assert rules_for("0.22.1") is rules_for(None) is rules_for("unknown")
    assert rules_for("0.22.1").counts_graphs
    assert rules_for("0.32.0+cpu").batches_in_flight == 2
    assert rules_for("1.0.0") is rules_for("0.33.0")


def test_the_old_sampler_needs_more() -> None:
    assert rules_for("0.10.0").sampler_bytes_per_logit > 2 * rules_for("0.22.1").sampler_bytes_per_logit
