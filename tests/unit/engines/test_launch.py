"""Command lines from templates, ports, names, and the environment of a server."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from autotune.engines import launch
from autotune.errors import InputError, PrerequisiteError

ARGS = ["acme/m", "--max-num-seqs", "8"]
ENDS = ["--host", "127.0.0.1", "--port", "81", "--served-model-name", "n1"]


def line(template: str, devices: tuple[int, ...] | None = None) -> list[str]:
    return launch.command_line(template, ARGS, port=81, name="n1", devices=devices)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("vllm serve", ["vllm", "serve", *ARGS, *ENDS]),
        ("python -m vllm.entrypoints.openai.api_server --model {args}", None),
        ("wrap --gpus={devices} vllm serve", ["wrap", "--gpus=0,3", "vllm", "serve", *ARGS, *ENDS]),
        ("run -p {port}:8000 image {args}", ["run", "-p", "81:8000", "image", *ARGS, *ENDS[:2], *ENDS[4:]]),
        (
            "serve --port {port} --name {name} --on {host}",
            ["serve", "--port", "81", "--name", "n1", "--on", "127.0.0.1", *ARGS],
        ),
        ("x {args} --last", ["x", *ARGS, *ENDS, "--last"]),
        ("x '${HOME}' '{\"a\": 1}'", ["x", "${HOME}", '{"a": 1}', *ARGS, *ENDS]),
    ],
)
def test_templates(template: str, expected: list[str] | None) -> None:
    if expected is None:
        expected = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", *ARGS, *ENDS]
    assert line(template, devices=(0, 3)) == expected


def test_arguments_inside_a_shell_word_are_quoted() -> None:
    words = launch.command_line("bash -c 'source e && vllm serve {args}'", ["m", '{"a": 1}'], port=81, name="n1")
    assert words[:2] == ["bash", "-c"]
    assert shlex.split(words[2])[-8:] == ["m", '{"a": 1}', *ENDS]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("vllm serve {prot}", "unknown placeholder {prot}"),
        ("", "empty"),
        ("vllm 'serve", "cannot be read"),
        ("vllm serve --port 8000", "fixes --port"),
        ("vllm serve --host=0.0.0.0 {args}", "fixes --host"),
        ("vllm serve --served-model-name x", "fixes --served-model-name"),
    ],
)
def test_templates_that_cannot_be_used(template: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        line(template)
    assert says in str(caught.value)
    assert caught.value.hint


def test_what_is_recorded_is_the_same_at_each_start_and_holds_no_secret() -> None:
    template = "env HF_TOKEN=hf_abcdefghijkl MY_API_KEY=xyz run -p {port}:8000 --auth hf_abcdefghijkl vllm serve {args}"
    assert launch.shown(template, ARGS) == (
        "env", "HF_TOKEN=***", "MY_API_KEY=***", "run", "-p", "{port}:8000", "--auth", "hf_***", "vllm", "serve", *ARGS,
    )  # fmt: skip
    assert launch.shown("vllm serve", ARGS) == ("vllm", "serve", *ARGS)
    assert launch.shown("bash -c 'vllm serve {args}'", ARGS)[2] == "vllm serve acme/m --max-num-seqs 8"


def test_a_held_port_is_nobody_elses_until_it_is_released() -> None:
    held, other = launch.Port(), launch.Port()
    assert held.number != other.number
    with socket.socket() as rival:
        with pytest.raises(OSError, match="in use"):
            rival.bind((launch.HOST, held.number))
        held.release()
        rival.bind((launch.HOST, held.number))
    other.release()


def test_names_are_unique() -> None:
    assert len({launch.new_name() for _ in range(50)}) == 50


def test_the_program_is_found_on_the_path_or_beside_this_python(tmp_path: Path) -> None:
    program = tmp_path / "serve-it"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert launch.found(["serve-it", "x"], {"PATH": str(tmp_path)}) == [str(program), "x"]
    beside = Path(sys.executable).name
    assert launch.found([beside], {"PATH": "/nowhere"}) == [str(Path(sys.executable).parent / beside)]
    assert launch.found([str(program)], {}) == [str(program)]


def test_no_vllm_is_a_missing_prerequisite() -> None:
    with pytest.raises(PrerequisiteError, match="'vllm-not-here' is not installed") as caught:
        launch.found(["vllm-not-here", "serve"], {"PATH": "/nowhere"})
    assert "pip install" in str(caught.value)
    assert caught.value.exit_code == 2


def environment(base: dict[str, str], devices: tuple[int, ...] | None = None, grace_s: float = 20.0) -> dict[str, str]:
    return launch.server_environment(base, devices=devices, start_limit_s=900, stop_grace_s=grace_s)


def test_the_environment_is_safe_to_measure_in() -> None:
    base = {
        "PROMETHEUS_MULTIPROC_DIR": "/x",
        "VLLM_PORT": "1",
        "FORCE_COLOR": "1",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    }
    env = environment({**base, "PATH": "/bin", "HF_TOKEN": "hf_secret", "VLLM_LOGGING_LEVEL": "ERROR"})
    assert not set(base) & set(env)
    assert env["PATH"] == "/bin"
    assert env["HF_TOKEN"] == "hf_secret"
    assert env["VLLM_SERVER_DEV_MODE"] == env["VLLM_NO_USAGE_STATS"] == env["NO_COLOR"] == "1"
    assert env["VLLM_LOG_STATS_INTERVAL"] == "5"
    assert env["VLLM_LOGGING_LEVEL"] == "INFO"
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "900"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert base["VLLM_PORT"] == "1"


def test_what_the_user_set_on_purpose_stays() -> None:
    env = environment(
        {
            "VLLM_LOGGING_LEVEL": "debug",
            "VLLM_ENGINE_READY_TIMEOUT_S": "7",
            "CUDA_VISIBLE_DEVICES": "4,5",
            "VLLM_CACHE_ROOT": "/c",
        }
    )
    assert env["VLLM_LOGGING_LEVEL"] == "debug"
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7"
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert env["VLLM_CACHE_ROOT"] == "/c"


@pytest.mark.parametrize(("grace_s", "workers_s"), [(20.0, "5"), (4.0, "2"), (0.5, "1")])
def test_workers_end_before_they_are_killed(grace_s: float, workers_s: str) -> None:
    assert environment({}, grace_s=grace_s)["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == workers_s


def test_devices_are_numbered_as_in_nvml() -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": "4,5,6"}, devices=(5, 4))
    assert env["CUDA_VISIBLE_DEVICES"] == "5,4"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
