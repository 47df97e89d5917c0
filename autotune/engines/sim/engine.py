"""The simulated engine behind the seam: starts, loads and their clock are virtual, the records are real ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

from autotune import __version__
from autotune.engines.flags import check_owned, render
from autotune.engines.launch import shown
from autotune.engines.sim.load import Answer, Counters, Pace, VirtualLoad
from autotune.engines.sim.starts import Starts, out_of_memory, refusal
from autotune.engines.sim.world import SimWorld, Truth
from autotune.errors import InputError, LaunchFailed
from autotune.hub import known_config
from autotune.physics.closed_loop import ServerSim
from autotune.physics.gpus import Hardware, parse_gpus
from autotune.physics.laws import HLE_LAW, LengthLaw, shipped_law
from autotune.physics.model_card import ModelCard
from autotune.physics.startup import compile_key, startup_s
from autotune.records.event import Emit, Event, nowhere
from autotune.records.load import LoadPlan, Message, Request
from autotune.records.observation import Capacity, Observation, StopRule
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec

STOP_S = 5.0
CHARACTERS = 4
"""Of a token, about: a simulated server has no tokenizer."""
WORDS = 10_000
"""Of its vocabulary."""
TEMPLATE_TOKENS = 5
"""That a chat template puts around a message."""


class SimSession:
    """One life of a simulated server; made by ``SimEngine.session``."""

    def __init__(
        self,
        engine: SimEngine,
        settings: Settings,
        truth: Truth,
        *,
        argv: tuple[str, ...],
        start: int,
        startup_s: float,
    ) -> None:
        self.startup_s = startup_s
        self.argv = argv
        self.capacity = Capacity(
            kv_tokens=truth.fit.kv_capacity_tokens,
            engines=truth.engines,
            max_model_len=truth.fit.max_model_len,
            max_num_seqs=truth.limits.max_num_seqs,
            source="model",
        )
        self.versions: Mapping[str, str] = {"sim": __version__}
        self.resolved: Mapping[str, object] | None = None
        self._engine, self._settings, self._truth, self._start = engine, settings, truth, start
        self._counters = Counters()
        self._loads = 0
        self._dies_s = engine.world.dies_after_s(settings, truth, start)
        """Seconds of load that are left to the server; ``None``: it lives."""

    def observe(self, load: LoadPlan, *, stop: StopRule) -> Observation:
        """Run one load in virtual time; a death is in the observation."""
        engine, truth = self._engine, self._truth
        server = ServerSim(
            truth.model,
            truth.limits,
            engines=truth.engines,
            noise=engine.world.noise(self._settings, self._start, self._loads),
        )
        run = VirtualLoad(
            server,
            load,
            answer=self._answer,
            before=self._counters,
            pace=engine.pace,
            emit=engine.emit,
            dies_s=self._dies_s,
            death=lambda: out_of_memory(engine.hardware),
        )
        seen = run.run(stop)
        self._counters = run.counters
        self._loads += 1
        if self._dies_s is not None:
            self._dies_s = max(0.0, self._dies_s - seen.t_s)
        engine.pass_time(seen.t_s, waited=True)
        return seen

    def token_ids(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, object] | None = None
    ) -> tuple[int, ...]:
        """About four characters a token; equal text gives equal ids."""
        ids: list[int] = []
        for message in messages:
            text = message.content.encode()
            ids += range(TEMPLATE_TOKENS)
            ids += (
                TEMPLATE_TOKENS + crc32(text[at : at + CHARACTERS]) % WORDS
                for at in range(0, len(text) // CHARACTERS * CHARACTERS, CHARACTERS)
            )
        return tuple(ids)

    def _answer(self, request: Request) -> Answer:
        """A forced length, else the law's length for this question; cut at the context as vLLM does."""
        prompt = len(request.prompt) if request.prompt is not None else request.prompt_tokens
        if prompt is None:
            prompt = len(self.token_ids(request.messages or ()))
        prompt = max(1, prompt)
        room = self._truth.fit.max_model_len - prompt
        if room < 1:
            text = f"400: maximum context length is {self._truth.fit.max_model_len} tokens, the prompt has {prompt}"
            return Answer(prompt_tokens=prompt, output_tokens=0, finish_reason="error", refused=text)
        limit = min(request.max_tokens, room)
        if request.forced:
            return Answer(prompt_tokens=prompt, output_tokens=limit, finish_reason="length")
        whole = round(self._engine.law.quantile(self._engine.world.share_of(request.id)))
        left = max(1, whole - request.context_tokens)
        reason = "stop" if left <= limit else "length"
        return Answer(prompt_tokens=prompt, output_tokens=min(left, limit), finish_reason=reason)


class SimEngine:
    """Starts simulated servers.

    Deterministic by the world's seed, the settings, the load, and how often these settings were started before.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        folder: Path | None = None,
        emit: Emit = nowhere,
        world: SimWorld | None = None,
        law: LengthLaw | None = None,
    ) -> None:
        """An engine.

        Args:
            spec: model, hardware in words, fixed flags, seed and tilt of the world, real seconds a virtual one takes.
            folder: of the attempt; its neighbours hold the study's other starts.
            world: instead of the spec's.
            law: of the answers that are not forced, before they are cut; ``None``: ``hle-reasoning``.

        Raises:
            InputError: no hardware is named, or the model is not known.
            PrerequisiteError: the model's config cannot be had.
        """
        if spec.gpus is None:
            raise InputError("the simulator needs to know the hardware", hint="--gpus 8xH200")
        if spec.real_time < 0:
            raise InputError(f"real_time is at least 0 real seconds for a virtual one, got {spec.real_time:g}")
        self.hardware: Hardware = parse_gpus(spec.gpus)
        self.world = SimWorld(spec.seed, tilt=spec.tilt) if world is None else world
        self.pace, self.emit = Pace(spec.real_time), emit
        self._spec, self._law = spec, law
        self._starts = Starts(folder)
        self._clock_s = 0.0
        found = known_config(spec.model)
        self._card = ModelCard.from_config(found.config, found.name)

    @cached_property
    def law(self) -> LengthLaw:
        """Lengths of answers that are not forced."""
        return shipped_law(HLE_LAW, None)[0] if self._law is None else self._law

    def now(self) -> float:
        """Virtual seconds since the engine was made."""
        return self._clock_s

    def pass_time(self, seconds: float, *, waited: bool = False) -> None:
        """Move the clock; ``waited``: their real time was taken already."""
        if not waited:
            self.pace.wait(seconds)
        self._clock_s += seconds

    def hidden_truth(self, settings: Settings) -> Truth:
        """What a server with these flags truly does: for tests only."""
        return self.world.hidden_truth(self._card, self.hardware, {**self._spec.fixed, **settings})

    @contextmanager
    def session(self, settings: Settings) -> Iterator[SimSession]:
        """One server with these flags.

        Raises:
            LaunchFailed: vLLM would not start with them.
            InputError: a flag that autotune chooses itself, or whose value cannot be read.
        """
        flags = Settings({**self._spec.fixed, **settings})
        check_owned(flags)
        truth = self.hidden_truth(settings)
        self._tell("server_starting", settings=flags.to_data(), seconds=0.0)
        refused = refusal(self._card, self.hardware, flags, truth)
        start, warm = self._starts.add(flags, compile_key(self._card, self.hardware, flags))
        if refused is not None:
            failure, seconds = refused
            self.pass_time(seconds)
            raise LaunchFailed(failure, seconds)
        seconds = startup_s(self._card, self.hardware, flags, warm=warm) * self.world.starts_slower(flags, start)
        self.pass_time(seconds)
        session = SimSession(
            self,
            flags,
            truth,
            argv=shown(self._spec.vllm_command, [self._spec.model, *render(flags)]),
            start=start,
            startup_s=seconds,
        )
        self._tell("server_ready", startup_s=seconds, kv_tokens=session.capacity.kv_tokens)
        try:
            yield session
        finally:
            self.pass_time(STOP_S)
            self._tell("server_stopped", seconds=STOP_S)

    def _tell(self, kind: Any, **data: object) -> None:
        self.emit(Event(kind=kind, data=data))
