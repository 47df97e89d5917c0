"""The contract of every engine as a pytest class: inherit it, say how to make the engine, run it.

class TestMine(EngineContract):
    @pytest.fixture
    def make_engine(self, tmp_path): return lambda fault=None: MyEngine(...)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.engines.base import Engine, Session
from autotune.errors import LaunchFailed
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import Observation
from autotune.records.settings import Settings

MakeEngine = Callable[..., Engine]


def mixed_load(concurrency: int, requests: int, *, tokens: int = 40, salt: str = "contract") -> LoadPlan:
    """Forced requests of different lengths (``tokens`` to 2 x ``tokens``), each with a prompt of its own."""
    made = tuple(
        Request(
            id=f"{salt}-{number}",
            prompt=tuple(100 + (number * 31 + place) % 900 for place in range(20 + number % 17)),
            max_tokens=tokens + (number * 7) % (tokens + 1),
            forced=True,
            salt=salt,
        )
        for number in range(requests)
    )
    return LoadPlan(start=made[:concurrency], refill=made[concurrency:], request_limit_s=60.0)


def never(so_far: Observation) -> str | None:
    """A stop rule that lets the load drain."""
    return None


class EngineContract:
    """What every engine keeps. Times are those of the observation, so that simulated engines run it, too."""

    settings = Settings(max_num_seqs=64)
    """Start well."""
    bad_settings = Settings(tensor_parallel_size=3)
    """Can never start."""
    concurrency = 6

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        """Gives ``make(fault=None)``; ``make(fault="dies")`` is an engine that dies under the first load."""
        raise NotImplementedError

    def left_over(self) -> list[str]:
        """What a session left behind, in words; nothing is right."""
        return []

    def test_a_session_says_what_it_can_hold(self, make_engine: MakeEngine) -> None:
        """Start-up time, capacity and limits are known before any load."""
        with make_engine().session(self.settings) as session:
            assert session.startup_s > 0
            assert session.capacity.engines >= 1
            assert session.capacity.kv_tokens is not None
            assert session.capacity.kv_tokens > 0
            assert session.capacity.max_num_seqs == self.settings["max_num_seqs"]
            assert session.capacity.max_model_len is not None

    def test_exactly_n_are_in_flight(self, make_engine: MakeEngine) -> None:
        """By the client's count and by what the server saw."""
        with make_engine().session(self.settings) as session:
            seen = session.observe(mixed_load(self.concurrency, 20_000), stop=_after(2.5))
        assert (seen.client.in_flight_min, seen.client.in_flight_max) == (self.concurrency, self.concurrency)
        held = [
            s.running + s.waiting for s in seen.samples if s.t_s > 0 and s.running is not None and s.waiting is not None
        ]
        assert len(held) >= 2
        assert max(held) <= self.concurrency
        # A request that has just ended and its successor that has not yet arrived: never more than a moment.
        assert sum(held) / len(held) > 0.9 * self.concurrency

    def test_a_load_drains_and_counters_agree(self, make_engine: MakeEngine) -> None:
        """Every request ends at its forced length; the counters moved by exactly what was answered."""
        load = mixed_load(self.concurrency, 40)
        with make_engine().session(self.settings) as session:
            seen = session.observe(load, stop=never)
        assert seen.end == "drained"
        assert seen.failure is None
        self._all_answered(seen, load)
        first, last = seen.samples[0], seen.samples[-1]
        assert first.generation_tokens is not None
        assert last.generation_tokens is not None
        assert last.generation_tokens - first.generation_tokens == sum(r.output_tokens or 0 for r in seen.requests)
        assert first.prompt_tokens is not None
        assert last.prompt_tokens is not None
        assert last.prompt_tokens - first.prompt_tokens == sum(r.prompt_tokens or 0 for r in seen.requests)
        assert last.running == last.waiting == 0

    def test_the_stop_rule_ends_the_load(self, make_engine: MakeEngine) -> None:
        """At its reason; what was in flight has no end and no error."""
        with make_engine().session(self.settings) as session:
            seen = session.observe(mixed_load(self.concurrency, 20_000), stop=_after(1.5))
        assert seen.end == "stopped:long enough"
        assert seen.t_s >= 1.5
        running = [r for r in seen.requests if r.ended_s is None]
        assert 1 <= len(running) <= self.concurrency
        assert all(r.error is None for r in seen.requests)

    def test_a_second_load_needs_no_restart(self, make_engine: MakeEngine) -> None:
        """Counters go on from where the first load left them."""
        loads = [mixed_load(n, 20, salt=f"load-{n}") for n in (2, self.concurrency)]
        with make_engine().session(self.settings) as session:
            first, second = (session.observe(load, stop=never) for load in loads)
        for seen, load in zip((first, second), loads, strict=True):
            assert seen.end == "drained"
            self._all_answered(seen, load)
        assert first.samples[-1].generation_tokens == second.samples[0].generation_tokens

    def test_a_load_after_a_stopped_one_starts_clean(self, make_engine: MakeEngine) -> None:
        """What was cancelled does not run on inside the next load."""
        load = mixed_load(2, 4, salt="after")
        with make_engine().session(self.settings) as session:
            session.observe(mixed_load(self.concurrency, 2_000, tokens=5_000), stop=_after(1.0))
            seen = session.observe(load, stop=never)
        self._all_answered(seen, load)
        assert seen.samples[0].running == 0

    def test_a_death_under_load_is_reported(self, make_engine: MakeEngine) -> None:
        """Not raised; a load after it says the same at once."""
        with make_engine(fault="dies").session(self.settings) as session:
            seen = session.observe(mixed_load(self.concurrency, 20_000), stop=_after(60.0))
            again = session.observe(mixed_load(1, 1), stop=never)
        for observation in (seen, again):
            assert observation.end == "engine_died"
            assert observation.failure is not None
            assert observation.failure.line
        assert self.left_over() == []

    def test_settings_that_cannot_start_are_a_failure_with_a_kind(self, make_engine: MakeEngine) -> None:
        """``LaunchFailed`` carries kind, line and seconds."""
        with pytest.raises(LaunchFailed) as caught, make_engine().session(self.bad_settings):
            pass
        assert caught.value.failure.kind not in ("unknown", "engine_died")
        assert caught.value.failure.line
        assert caught.value.seconds >= 0
        assert self.left_over() == []

    def test_nothing_is_left_behind(self, make_engine: MakeEngine) -> None:
        """Neither after a session nor after an error inside one; and a new session can start."""
        engine = make_engine()
        with engine.session(self.settings):
            pass
        assert self.left_over() == []
        with pytest.raises(KeyError), engine.session(self.settings) as session:
            _raise_inside(session)
        assert self.left_over() == []

    def _all_answered(self, seen: Observation, load: LoadPlan) -> None:
        asked = {request.id: request for request in (*load.start, *load.refill)}
        assert {r.id for r in seen.requests} == set(asked)
        for outcome in seen.requests:
            assert outcome.error is None
            assert outcome.ended_s is not None
            assert outcome.ended_s >= outcome.sent_s >= 0
            assert outcome.output_tokens == asked[outcome.id].max_tokens
            assert outcome.finish_reason == "length"
            assert outcome.prompt_tokens == len(asked[outcome.id].prompt or ())


def _after(seconds: float) -> Callable[[Observation], str | None]:
    return lambda so_far: "long enough" if so_far.t_s >= seconds else None


def _raise_inside(session: Session) -> None:
    raise KeyError(session.startup_s)
