"""A workload made ready for one server: what fits is tokenised and admitted, loads are planned from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.engines.base import Session
from autotune.errors import InputError, PrerequisiteError
from autotune.hub import known_config
from autotune.measure.judge import Known
from autotune.measure.stationary import Prompt, stationary_load
from autotune.physics.gpus import parse_gpus
from autotune.physics.laws import HLE_LAW, LAW_SD, law_of, shipped_law
from autotune.physics.lengths import AnswerLengths, KnownLength, observed_lengths
from autotune.physics.model_card import ModelCard
from autotune.physics.stepstart import from_card
from autotune.physics.steptime import StepModel
from autotune.planning.random_weights import random_weights
from autotune.records.lengths import Lengths
from autotune.records.load import LoadPlan, Request, request_limit_s
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, MeasureSpec, TrialTask, WorkloadSpec
from autotune.workloads import Question, Workload, load
from autotune.workloads.requests import plan_requests
from autotune.workloads.sampling import admit, aside_note
from autotune.workloads.tokens import TokenCounter

REFILL_ROUNDS = 50
"""Requests ready for each one in flight: more answers than any window waits for."""
REFILL_LEAST = 20_000
"""A small model with short answers ends a hundred a second."""
KNOWN_ROUNDS, KNOWN_TOKENS = 10, 30_000_000
"""Where lengths are known fewer will do: so many answers for each one in flight, or so many tokens, 30,000 a
second for a quarter of an hour. Twenty thousand answers of ten thousand tokens are never written in one load."""
SAMPLES_A_WINDOW = 16
"""Readings of the counters in the shortest window: ten batches of at least one each."""
FEWEST_WORDS = 50
"""Token ids that random text is made of, at least; with fewer, the prompts' special tokens serve, too."""


def asked(engine: EngineSpec, workload: WorkloadSpec) -> WorkloadSpec:
    """What is asked: where nobody answers in earnest (the simulator, dummy weights) and the questions of ``hle`` are
    not given as a file, forced requests of the shipped length law instead; no network, no access needed."""
    in_earnest = engine.kind != "sim" and not random_weights(engine.fixed)
    if in_earnest or workload.name != "hle" or workload.path is not None:
        return workload
    return replace(workload, name="synthetic", law=HLE_LAW, official_prompt=False)


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load, ready to be sent."""

    plan: LoadPlan
    known: Known | None
    """What is known of it where it starts in its steady state; ``None``: it starts fresh."""

    @property
    def planned(self) -> Mapping[str, int] | None:
        """Tokens asked for by request id; ``None``: answers end by themselves."""
        requests = (*self.plan.start, *self.plan.refill)
        return {r.id: r.max_tokens for r in requests} if all(r.forced for r in requests) else None


class Loads:
    """The questions of one trial, tokenised for its model and admitted for its server.

    Attributes:
        workload: the questions.
        admitted: those that fit.
        prompt_tokens: by question id; ``None``: not to be had.
        available: questions that can be in flight at once.
        answers: lengths of the answers; ``None``: not known, so that loads start fresh.
        set_aside: prompts that do not fit and are not sent.
        notes: what the user should be told.
    """

    def __init__(self, task: TrialTask, session: Session) -> None:
        """Tokenise and admit.

        Raises:
            InputError: no question fits the server's context, an unknown law of lengths, or a limit of latency on the
                simulator.
            PrerequisiteError: the data are not to be had from here.
        """
        if task.engine.kind == "sim" and _streams(task.measure):
            raise InputError(
                "the simulator has no latencies to hold against max_ttft or max_tpot",
                hint="leave --max-ttft and --max-tpot out, or measure a real server",
            )
        self._spec = asked(task.engine, task.workload)
        self._task = task
        self._capacity = session.capacity
        self._salted = has_salts(session.versions)
        self.workload = load(self._spec)
        self._counter = None if task.engine.kind == "sim" else _counter(task, session)
        ids = _token_ids(task, session, self.workload, self._counter)
        self.prompt_tokens = None if ids is None else {name: len(tokens) for name, tokens in ids.items()}
        self.admitted, aside = admit(
            self.workload.questions, self.prompt_tokens, session.capacity.max_model_len, task.workload.max_tokens
        )
        self.set_aside = len(aside)
        self.notes = self.workload.notes
        if aside and self.prompt_tokens is not None:
            self.notes = (*self.notes, aside_note(aside, self.prompt_tokens))
        self.available = len(self.admitted)
        self._prompts = () if ids is None else tuple(self._prompt(r, ids) for r in self.requests("none"))
        self._words = _words([prompt.tokens for prompt in self._prompts])
        self._model = start_model(task.engine, task.settings)
        self.answers = known_answers(task, self._spec, self.admitted)
        if self.answers is not None and not self._prompts:
            self.notes = (*self.notes, "prompts cannot be tokenised here, so that loads start fresh")

    def learn(self, lengths: Lengths) -> None:
        """Lengths of the answers, found out by a probe."""
        self.answers = observed_lengths(lengths, self._spec.max_tokens, prior=True)

    def remember(self, texts: Mapping[str, str]) -> None:
        """Answers that were written before, by question id: loads carry on from them instead of from random text."""
        if self._counter is None:
            return
        written = {p.id: self._counter.text_ids(texts[p.id]) for p in self._prompts if p.id in texts}
        known = [replace(p, answer=written.get(p.id) or p.answer) for p in self._prompts]
        self._prompts = tuple(sorted(known, key=lambda p: not p.answer))  # those first, the rest in its order

    @property
    def model(self) -> StepModel | None:
        """Step constants of one engine of this server before any load; ``None``: nothing is known of them."""
        return self._model

    def load(self, concurrency: int, index: int) -> Load:
        """The ``index``-th load of the trial, with ``concurrency`` in flight.

        Where lengths are known it starts in its steady state, with the same lengths in every trial; else it asks
        the questions from the beginning. The salt keeps the prefix-cache blocks of loads apart, so that a later
        one is not answered from an earlier one's cache; for servers without salts each asks other questions.
        """
        salt = f"trial-{self._task.number}-load-{index}"
        if self.answers is None or not self._prompts:
            requests = self.requests(salt, number=concurrency + self._refill(concurrency))
            return Load(plan=self.plan(requests, concurrency), known=None)
        law, capacity = self.answers.law, self._capacity
        steady = stationary_load(
            law,
            self._prompts,
            concurrency=concurrency,
            refill=min(REFILL_LEAST, max(KNOWN_ROUNDS * concurrency, math.ceil(KNOWN_TOKENS / law.mean))),
            seed=self._spec.seed,
            salt=salt,
            ids=self._words,
            slots=None if capacity.max_num_seqs is None else capacity.max_num_seqs * capacity.engines,
            first=0 if self._salted else index * len(self._prompts) // KNOWN_ROUNDS,
            max_model_len=capacity.max_model_len,
        )
        plan = self.plan((*steady.start, *steady.refill), concurrency)
        return Load(plan=plan, known=Known(load=steady, answers=self.answers, model=self._model))

    def requests(
        self, salt: str, *, questions: Sequence[Question] | None = None, number: int | None = None
    ) -> tuple[Request, ...]:
        """The questions in the study's order, each once or ``number`` in all, not forced unless they are so."""
        return plan_requests(
            self.workload,
            counts=self.prompt_tokens,
            max_tokens=self._spec.max_tokens,
            seed=self._spec.seed,
            questions=self.admitted if questions is None else questions,
            number=number,
            salt=salt,
        )

    def plan(self, requests: Sequence[Request], concurrency: int, *, keep_text: bool = False) -> LoadPlan:
        """These requests in their order, ``concurrency`` in flight."""
        measure = self._task.measure
        return LoadPlan(
            start=tuple(requests[:concurrency]),
            refill=tuple(requests[concurrency:]),
            request_limit_s=request_limit_s(self._spec.max_tokens),
            sampling=self._spec.sampling,
            sample_s=min(1.0, measure.window_s / SAMPLES_A_WINDOW),
            stall_s=measure.stall_s,
            chat_template_kwargs=self._spec.chat_template_kwargs or None,
            stream=_streams(measure),
            keep_text=keep_text,
        )

    def _refill(self, concurrency: int) -> int:
        """Requests to have ready beside those in flight, of a fresh start."""
        number = max(REFILL_ROUNDS * concurrency, REFILL_LEAST)
        if not all(question.forced for question in self.admitted):
            return number
        mean = sum(q.output_limit(self._spec.max_tokens) for q in self.admitted) / self.available
        return min(number, max(KNOWN_ROUNDS * concurrency, math.ceil(KNOWN_TOKENS / mean)))

    @staticmethod
    def _prompt(request: Request, ids: Mapping[str, tuple[int, ...]]) -> Prompt:
        return Prompt(id=request.id, tokens=ids[request.id])


def has_salts(versions: Mapping[str, str]) -> bool:
    """Whether the server keeps prefix-cache blocks of different salts apart: vLLM from 0.9 on."""
    found = re.match(r"(\d+)\.(\d+)", versions.get("vllm", ""))
    return found is not None and (int(found[1]), int(found[2])) >= (0, 9)


def _streams(measure: MeasureSpec) -> bool:
    """Whether answers are streamed: only where a latency is limited, for it costs client CPU."""
    return measure.max_ttft_s is not None or measure.max_tpot_s is not None


def known_answers(task: TrialTask, spec: WorkloadSpec, questions: Sequence[Question]) -> AnswerLengths | None:
    """Lengths of the answers before anything is asked; ``None``: not known.

    Args:
        spec: what is asked (``asked``).
        questions: those that are asked.

    Raises:
        InputError: an unknown law.
    """
    if task.law is not None or (spec.law is not None and random_weights(task.engine.fixed)):
        return _shipped(task.law or spec.law or HLE_LAW, spec.max_tokens)
    if task.lengths is not None:
        return observed_lengths(task.lengths, spec.max_tokens, prior=True)
    if all(question.forced for question in questions):
        lengths = [(float(question.output_limit(spec.max_tokens)), 1.0) for question in questions]
        uncut = law_of(lengths, spec.law or spec.name, spec.max_tokens)
        return KnownLength(uncut=uncut, max_tokens=spec.max_tokens)
    if random_weights(task.engine.fixed):
        return _shipped(HLE_LAW, spec.max_tokens)
    return None


def _shipped(name: str, max_tokens: int) -> KnownLength:
    """A shipped law, which is not the run's own."""
    return KnownLength(uncut=shipped_law(name, None)[0], max_tokens=max_tokens, scale_sd=LAW_SD)


def start_model(engine: EngineSpec, settings: Settings) -> StepModel | None:
    """What physics says of a server with these settings; ``None``: model or hardware are not known, or no GPU."""
    if engine.gpus is None:
        return None
    try:
        hardware, found = parse_gpus(engine.gpus), known_config(engine.model)
        if hardware.gpu.is_cpu:
            return None
        card = ModelCard.from_config(found.config, found.name)
        return from_card(card, hardware, Settings({**engine.fixed, **settings}))
    except (InputError, PrerequisiteError):
        return None


def _counter(task: TrialTask, session: Session) -> TokenCounter:
    kwargs = task.workload.chat_template_kwargs
    return TokenCounter(
        task.engine.model,
        chat_template_kwargs=kwargs,
        remote=lambda messages: session.token_ids(messages, kwargs),
    )


def _token_ids(
    task: TrialTask, session: Session, workload: Workload, counter: TokenCounter | None
) -> Mapping[str, tuple[int, ...]] | None:
    """Prompts as token ids, by question id; the simulator has its own, so that it needs no tokenizer."""
    if counter is not None:
        return counter.ids(workload.questions)
    kwargs = task.workload.chat_template_kwargs
    asked_here = [(q, q.prompt or session.token_ids(q.messages, kwargs)) for q in workload.questions]
    return {q.id: ids for q, ids in asked_here if ids is not None}


def _words(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Token ids of the questions' words: what every prompt has is the template's, and left out."""
    if not prompts:
        return ()
    everywhere = set(prompts[0]).intersection(*prompts[1:]) if len(prompts) > 1 else set()
    words = sorted({token for prompt in prompts for token in prompt} - everywhere)
    return tuple(words) if len(words) >= FEWEST_WORDS else tuple(sorted({t for prompt in prompts for t in prompt}))
