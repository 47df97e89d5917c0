"""The seam of the simulator, beside what the contract says of all engines."""

from __future__ import annotations

import pytest

from autotune.engines import engine_for
from autotune.engines.sim import SimEngine, SimWorld
from autotune.errors import InputError
from autotune.records.load import Message
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec
from tests.unit.engines.sim.machines import MODEL, after, engine, never, plan


def test_the_clock_is_virtual() -> None:
    made = engine(SimWorld(1))
    assert made.now() == 0.0
    with made.session(Settings()) as session:
        assert made.now() == session.startup_s > 60
        seen = session.observe(plan(4, 200), stop=after(20.0))
        assert made.now() == pytest.approx(session.startup_s + seen.t_s)
    assert made.now() > session.startup_s + 20.0


def test_a_session_looks_like_a_real_one() -> None:
    spec = EngineSpec(kind="sim", model=MODEL, gpus="8xH200", fixed=Settings(dtype="bfloat16"))
    made = engine_for(spec)
    assert isinstance(made, SimEngine)
    with made.session(Settings(tensor_parallel_size=4, data_parallel_size=2)) as session:
        assert session.argv[:3] == ("vllm", "serve", MODEL)
        assert " ".join(session.argv[3:]) == "--data-parallel-size 2 --dtype bfloat16 --tensor-parallel-size 4"
        assert session.capacity.engines == 2
        assert session.capacity.source == "model"
        assert session.capacity.max_num_seqs == 1024
        assert session.capacity.max_model_len == 40_960
        assert list(session.versions) == ["sim"]
        assert session.resolved is None
        assert len(session.token_ids([Message(role="user", content="a" * 40)])) == 15


def test_seed_and_tilt_of_the_record_make_the_world() -> None:
    plain, seeded, tilted = (
        engine(**changes).hidden_truth(Settings()).model.t0_s
        for changes in ({}, {"seed": 3}, {"tilt": {"tensor_parallel_size=1": 0.5}})
    )
    assert seeded != plain
    assert tilted == pytest.approx(2 * plain)


def test_a_server_above_its_share_dies_under_load_and_stays_dead() -> None:
    made = engine(SimWorld(1, oom_above=0.96))
    with made.session(Settings(gpu_memory_utilization=0.97)) as session:
        short = session.observe(plan(2, 500), stop=after(2.0))
        dead = session.observe(plan(4, 9000), stop=after(60.0))
        again = session.observe(plan(1, 1), stop=never)
    assert short.end == "stopped:long enough"
    assert dead.end == again.end == "engine_died"
    assert dead.failure is not None
    assert dead.failure.kind == "oom"
    assert short.t_s + dead.t_s <= 45.0
    assert again.t_s == 0.0
    assert all(r.error is None for r in dead.requests)
    with made.session(Settings(gpu_memory_utilization=0.95)) as session:
        assert session.observe(plan(4, 9000), stop=after(60.0)).end == "stopped:long enough"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": None}, "hardware"),
        ({"gpus": "8xH999"}, "unknown GPU"),
        ({"real_time": -1.0}, "real_time"),
        ({"tilt": {"x": 1.0}}, "flag=value"),
        ({"model": "/no/such/folder"}, "no model folder"),
    ],
)
def test_what_cannot_be_simulated_is_said(changes: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        SimEngine(EngineSpec(**{"kind": "sim", "model": MODEL, "gpus": "8xH200", **changes}))


def test_flags_of_autotune_are_refused() -> None:
    with pytest.raises(InputError, match="not a setting of a study"), engine().session(Settings(port=1)):
        pass
