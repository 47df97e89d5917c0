"""Cards people serve with: memory, bandwidth, arithmetic and links, each figure with its source.

Memory is what ``cudaMemGetInfo`` calls total (vLLM multiplies ``gpu_memory_utilization`` with it); NVML's total is
up to 1 % larger. Bandwidth and FLOP/s are what kernels reach. Where nobody here measured, they are the maker's dense
figures times the share that an H200 reached: 0.90 of its bandwidth, 0.80 of its arithmetic.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from autotune.errors import InputError

GIB = 1024**3
_BANDWIDTH_SHARE = 0.90  # H200: device-to-device copy 4.3 TB/s of 4.8
_FLOPS_SHARE = 0.80  # H200: bf16 matrix product 790 TFLOP/s of 989
_NVLINK_ALL_REDUCE_S = 8e-6  # first guess that fitted TP 2 on H200 within 8 %
_PCIE_ALL_REDUCE_S = 30e-6  # guess: no peer-to-peer on most PCIe cards


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of card."""

    name: str
    memory_bytes: int
    """Total that CUDA reports."""
    bandwidth_bytes_per_s: float
    """Of its memory, reachable."""
    bf16_flops_per_s: float
    """Dense 16-bit matrix product, reachable."""
    fp8_flops_per_s: float
    """Dense 8-bit; equal to 16-bit where the card has none."""
    link_bytes_per_s: float
    """To the other cards of the host, one direction."""
    all_reduce_s: float
    """Latency of one small all-reduce: a guess until fitted."""
    source: str
    """Where the figures come from."""

    @property
    def is_cpu(self) -> bool:
        """The host's processor instead of a card."""
        return self.name == "CPU"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal cards of one host."""

    gpu: Gpu
    count: int
    used_bytes: int = 0
    """Held by others on each card (a display, another process) before the server starts."""

    @property
    def name(self) -> str:
        """``8xH200``."""
        return f"{self.count}x{self.gpu.name}"

    @property
    def free_bytes(self) -> int:
        """Free memory of one card."""
        return max(0, self.gpu.memory_bytes - self.used_bytes)

    def with_memory(self, memory_bytes: int) -> Hardware:
        """The same cards with another memory size (``--gpu-memory 80GiB``)."""
        return dataclasses.replace(self, gpu=dataclasses.replace(self.gpu, memory_bytes=memory_bytes))

    def with_used(self, used_bytes: int) -> Hardware:
        """The same cards with memory held by others."""
        return dataclasses.replace(self, used_bytes=used_bytes)

    def with_count(self, count: int) -> Hardware:
        """Another number of the same cards."""
        return dataclasses.replace(self, count=count)


def _card(
    name: str,
    gib: float,
    bandwidth: float,
    bf16: float,
    fp8: float | None,
    link: float,
    *,
    nvlink: bool,
    source: str,
) -> Gpu:
    """A row: GiB, TB/s, dense bf16 and fp8 TFLOP/s as the maker states them, link GB/s a direction."""
    return Gpu(
        name=name,
        memory_bytes=round(gib * GIB),
        bandwidth_bytes_per_s=bandwidth * 1e12 * _BANDWIDTH_SHARE,
        bf16_flops_per_s=bf16 * 1e12 * _FLOPS_SHARE,
        fp8_flops_per_s=(fp8 or bf16) * 1e12 * _FLOPS_SHARE,
        link_bytes_per_s=link * 1e9,
        all_reduce_s=_NVLINK_ALL_REDUCE_S if nvlink else _PCIE_ALL_REDUCE_S,
        source=f"{source}; memory as CUDA logs show it; 0.90 of bandwidth and 0.80 of FLOP/s as measured on an H200",
    )


_H200 = Gpu(
    name="H200",
    memory_bytes=round(139.8 * GIB),
    bandwidth_bytes_per_s=4.3e12,
    bf16_flops_per_s=790e12,
    fp8_flops_per_s=1979e12 * _FLOPS_SHARE,
    link_bytes_per_s=450e9,
    all_reduce_s=_NVLINK_ALL_REDUCE_S,
    source="measured 2026-11-30: copy 4.3 TB/s, bf16 GEMM 790 TFLOP/s, 139.8 GiB; fp8 and NVLink from the data sheet",
)
_TABLE = (
    _H200,
    _card("H100", 79.2, 3.35, 989, 1979, 450, nvlink=True, source="NVIDIA H100 data sheet, SXM5"),
    _card("H100 PCIe", 79.2, 2.0, 756, 1513, 64, nvlink=False, source="NVIDIA H100 data sheet, PCIe"),
    _card("H100 NVL", 93.1, 3.9, 835, 1671, 300, nvlink=True, source="NVIDIA H100 data sheet, NVL 94 GB"),
    _card("H20", 95.1, 4.0, 148, 296, 450, nvlink=True, source="NVIDIA H20 data sheet"),
    _card("GH200", 94.5, 4.0, 989, 1979, 64, nvlink=False, source="NVIDIA GH200 data sheet, 96 GB HBM3"),
    _card("A100-80GB", 79.2, 2.0, 312, None, 300, nvlink=True, source="NVIDIA A100 data sheet, SXM4 80 GB"),
    _card("A100-40GB", 39.5, 1.555, 312, None, 300, nvlink=True, source="NVIDIA A100 data sheet, SXM4 40 GB"),
    _card("B200", 178.35, 8.0, 2250, 4500, 900, nvlink=True, source="NVIDIA HGX B200 data sheet"),
    _card("B300", 267.0, 8.0, 2250, 4500, 900, nvlink=True, source="NVIDIA HGX B300 data sheet"),
    _card("MI300X", 192.0, 5.3, 1307, 2615, 448, nvlink=True, source="AMD MI300X data sheet"),
    _card("MI325X", 255.9, 6.0, 1307, 2615, 448, nvlink=True, source="AMD MI325X data sheet"),
    _card("MI355X", 287.9, 8.0, 2500, 5000, 537, nvlink=True, source="AMD MI355X data sheet"),
    _card("L40S", 44.4, 0.864, 362, 733, 32, nvlink=False, source="NVIDIA L40S data sheet"),
    _card("L40", 44.4, 0.864, 181, 362, 32, nvlink=False, source="NVIDIA L40 data sheet"),
    _card("L4", 22.05, 0.300, 121, 242, 32, nvlink=False, source="NVIDIA L4 data sheet"),
    _card("A10G", 22.05, 0.600, 70, None, 32, nvlink=False, source="NVIDIA A10G, AWS g5"),
    _card("A10", 22.05, 0.600, 125, None, 32, nvlink=False, source="NVIDIA A10 data sheet"),
    _card("A40", 44.4, 0.696, 150, None, 56, nvlink=False, source="NVIDIA A40 data sheet"),
    _card("T4", 14.6, 0.320, 65, None, 16, nvlink=False, source="NVIDIA T4 data sheet (fp16, no bf16)"),
    _card("V100-32GB", 31.7, 0.900, 125, None, 150, nvlink=True, source="NVIDIA V100 data sheet (fp16, no bf16)"),
    _card("RTX 3060", 11.6, 0.360, 25, None, 32, nvlink=False, source="NVIDIA RTX 3060 specification, fp32 sums"),
    _card("RTX 3090", 23.56, 0.936, 71, None, 32, nvlink=False, source="NVIDIA Ampere GA102 paper, fp32 sums"),
    _card("RTX 4080", 15.6, 0.717, 97, 195, 32, nvlink=False, source="NVIDIA Ada GPU paper, fp32 sums"),
    _card("RTX 4090", 23.52, 1.008, 165, 330, 32, nvlink=False, source="NVIDIA Ada GPU paper, fp32 sums"),
    _card("RTX 5070 Ti", 15.5, 0.896, 88, 176, 64, nvlink=False, source="NVIDIA RTX Blackwell paper, fp32 sums"),
    _card("RTX 5080", 15.5, 0.960, 113, 225, 64, nvlink=False, source="NVIDIA RTX Blackwell paper, fp32 sums"),
    _card("RTX 5090", 31.36, 1.792, 209, 419, 64, nvlink=False, source="NVIDIA RTX Blackwell paper, fp32 sums"),
    _card("RTX A6000", 47.4, 0.768, 155, None, 56, nvlink=False, source="NVIDIA RTX A6000 data sheet"),
    _card("RTX 6000 Ada", 47.4, 0.960, 364, 728, 32, nvlink=False, source="NVIDIA RTX 6000 Ada data sheet"),
    _card("RTX PRO 6000", 94.97, 1.792, 504, 1008, 64, nvlink=False, source="NVIDIA RTX PRO 6000 Blackwell data sheet"),
    _card("GB10", 119.7, 0.273, 125, 250, 25, nvlink=False, source="NVIDIA DGX Spark data sheet (shared memory)"),
    Gpu(
        name="CPU",
        memory_bytes=64 * GIB,
        bandwidth_bytes_per_s=40e9,
        bf16_flops_per_s=1e12,
        fp8_flops_per_s=1e12,
        link_bytes_per_s=20e9,
        all_reduce_s=50e-6,
        source="guess for a small host: give its memory with --gpu-memory; two DDR4 channels, AVX-512",
    ),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
"""The cards by name."""

# What a name may look like once vendor words, blanks and signs are gone; the first that matches counts.
_PATTERNS = (
    (r"h200(nvl|sxm5?|hbm3e|14[01]gb?)*", "H200"),
    (r"h100nvl(94gb?|hbm3)*|h10094gb?(nvl)?", "H100 NVL"),
    (r"h100(80gb?)?pcie(80gb?|gen5|hbm2e)*", "H100 PCIe"),
    (r"h[18]00(sxm5?|hbm3|80gb?|hgx)*", "H100"),
    (r"h20(96gb?|hbm3|sxm)*", "H20"),
    (r"gh200(480gb?|96gb?|120gb?|hbm3)*", "GH200"),
    (r"a[18]00(sxm4?|pcie|pg509)*40gb?(sxm4?|pcie)*|a10040g(sxm)?", "A100-40GB"),
    (r"a[18]00(sxm4?|pcie|80gb?|hbm2e?|x)*", "A100-80GB"),
    (r"g?b200(sxm6?|nvl72|180gb?|192gb?|hbm3e)*", "B200"),
    (r"g?b300(sxm6?|nvl72|288gb?|270gb?)*", "B300"),
    (r"mi300x(oam|hf|192gb?)*", "MI300X"),
    (r"mi325x(oam|256gb?)*", "MI325X"),
    (r"mi35[05]x(oam|288gb?)*", "MI355X"),
    (r"l40s(48gb?)?", "L40S"),
    (r"l40(48gb?)?", "L40"),
    (r"l4(24gb?)?", "L4"),
    (r"a10g(24gb?)?", "A10G"),
    (r"a10(24gb?|pcie)*", "A10"),
    (r"a40(48gb?|pcie)*", "A40"),
    (r"t4(16gb?)?", "T4"),
    (r"v100(sxm[23]?|pcie|32gb?|dgxs)*", "V100-32GB"),
    (r"(rtx)?3060(12gb?)?", "RTX 3060"),
    (r"(rtx)?3090(ti)?(24gb?)?", "RTX 3090"),
    (r"(rtx)?4080(super)?(16gb?)?", "RTX 4080"),
    (r"(rtx)?4090(24gb?)?", "RTX 4090"),
    (r"(rtx)?5070ti(16gb?)?", "RTX 5070 Ti"),
    (r"(rtx)?5080(16gb?)?", "RTX 5080"),
    (r"(rtx)?5090(32gb?)?", "RTX 5090"),
    (r"(rtx)?a6000(48gb?)?", "RTX A6000"),
    (r"(rtx)?6000ada(generation)?(48gb?)?", "RTX 6000 Ada"),
    (r"(rtx)?pro6000(blackwell)?(server|workstation|maxq|edition|96gb?|bse|wse)*", "RTX PRO 6000"),
    (r"gb10|dgxspark", "GB10"),
    (r"cpu", "CPU"),
)
_VENDOR_WORDS = re.compile(r"nvidia|geforce|quadro|tesla|amd|instinct|radeon|graphics|gpus?\b|accelerator")
# A count before or after the name, with the numbers of the groups that hold count and name.
_COUNT_FIRST = (re.compile(r"\s*(\d+)\s*(?:[x*×:]\s*|\s)(.+)", re.IGNORECASE), 1, 2)
_COUNT_LAST = (re.compile(r"\s*(.+?)\s*(?:[*×:]|x)\s*(\d+)\s*", re.IGNORECASE), 2, 1)


def parse_gpus(text: str) -> Hardware:
    """Hardware from ``8xH200``, ``h100``, ``2*RTX4090``, ``NVIDIA A100-SXM4-80GB``, ``RTX PRO 6000``.

    Raises:
        InputError: an unknown card (the hint names near ones) or a count below 1.
    """
    count, name, whole = 1, text, _find(text)
    for pattern, counted, named in (_COUNT_FIRST, _COUNT_LAST):
        found = pattern.fullmatch(text)
        if whole is None and found:
            count, name = int(found[counted]), found[named]
            whole = _find(name)
    if whole is None:
        near = difflib.get_close_matches(name.strip().upper(), [known.upper() for known in GPUS], n=3, cutoff=0.4)
        spelled = [known for known in GPUS if known.upper() in near]
        raise InputError(
            f"unknown GPU {name.strip()!r}",
            hint=f"near are {', '.join(spelled)}" if spelled else f"known are {', '.join(GPUS)}",
        )
    if count < 1:
        raise InputError(f"the number of GPUs must be at least 1, got {count} in {text!r}")
    return Hardware(gpu=whole, count=count)


def _find(name: str) -> Gpu | None:
    squashed = re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub(" ", name.lower()))
    return next((GPUS[known] for pattern, known in _PATTERNS if re.fullmatch(pattern, squashed)), None)
