"""Builds loads that start in the steady state: what is in flight at a random moment of a long run is sent at once.

In a closed loop with N in flight the answers being written at a random moment are length-biased, each at a
uniform age. So the first N requests are pairs (length, age) of that law: the prompt and the answer so far are
sent along, the rest is forced. Lengths come one from each of N equal shares of the length-biased law, ages from
the golden-ratio sequence, so that the pairs fill the plane evenly: simulated 20-s windows scatter 2-6 times less
than with pairs drawn by chance. Those that follow are fresh answers with the plain law's lengths, again in
golden-ratio order, so that any stretch of them is representative and no two neighbours are alike.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.physics.laws import LengthLaw
from autotune.records.load import Request

GOLDEN = (5**0.5 - 1) / 2
BLOCK = 16
"""Tokens of a prefix-cache block, vLLM's default: only whole blocks are found again."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question as the model reads it."""

    id: str
    tokens: tuple[int, ...]
    """Token ids, chat template applied, at least one."""
    answer: tuple[int, ...] = ()
    """Tokens of a recorded answer: its beginning is the answer so far, where it is long enough."""


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """What a closed loop holds on average in its steady state, summed over engines."""

    batch: float
    """Requests that the server works on at once: all in flight, or as many as it admits."""
    prompt_tokens: float
    """Mean of a request."""
    answer_tokens: float
    """Mean of an answer."""
    kv_tokens: float
    """Cached by all of them: batch * (prompt + E[L^2] / (2 E[L]))."""


@dataclass(frozen=True, kw_only=True)
class StationaryLoad:
    """Requests of one load, and what is expected of it."""

    start: tuple[Request, ...]
    refill: tuple[Request, ...]
    kv_tokens: int
    """Held once what the server works on first is in its cache."""
    long_run: LongRun
    hit_share: float
    """Of the prompt tokens, found in the prefix cache because questions begin alike (system prompt), 0..1."""

    def sent(self, ids: Collection[str]) -> StationaryLoad:
        """The same load as far as it was sent, without its text: what its judgement needs."""
        return replace(
            self,
            start=tuple(replace(r, prompt=()) for r in self.start if r.id in ids),
            refill=tuple(replace(r, prompt=()) for r in self.refill if r.id in ids),
        )

    def saturates(self, kv_capacity_tokens: int | None) -> bool:
        """Whether the first N alone need more cache than there is, so that some of them will wait."""
        return kv_capacity_tokens is not None and max(self.kv_tokens, self.long_run.kv_tokens) > kv_capacity_tokens


def long_run(law: LengthLaw, prompt_tokens: float, batch: float) -> LongRun:
    """The steady state of ``batch`` at work, answers by ``law``, prompts of a mean length."""
    return LongRun(
        batch=batch,
        prompt_tokens=prompt_tokens,
        answer_tokens=law.mean,
        kv_tokens=batch * (prompt_tokens + law.age_mean),
    )


def in_flight(law: LengthLaw, concurrency: int, rng: random.Random) -> list[tuple[int, int]]:
    """(length, age) of the answers in flight at a random moment, in random order; age is below length."""
    shift = rng.random()
    pairs = []
    for i in range(concurrency):
        length = max(1, round(law.biased_quantile((i + rng.random()) / concurrency)))
        pairs.append((length, int(length * ((shift + i * GOLDEN) % 1.0))))
    rng.shuffle(pairs)
    return pairs


def fresh_lengths(law: LengthLaw, rng: random.Random) -> Iterator[int]:
    """Lengths of answers that begin, for ever; any stretch holds its share of each part of the law."""
    shift = rng.random()
    for i in itertools.count():
        yield max(1, round(law.quantile((shift + i * GOLDEN) % 1.0)))


def stationary_load(
    law: LengthLaw,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    refill: int,
    seed: int,
    salt: str,
    ids: Sequence[int],
    slots: int | None = None,
    first: int = 0,
    max_model_len: int | None = None,
) -> StationaryLoad:
    """A load with ``concurrency`` in flight that starts in its steady state.

    Lengths and ages depend on the law, the concurrency and the seed alone, so that all settings of a study meet
    the same ones. What stands in for answers that were never recorded is random text by ``salt`` and another
    stretch of it for each request, so that no two requests, and no two loads, share more than their prompt.

    Args:
        law: of the answers, cut at the run's limit.
        prompts: asked in order and again from the beginning, then with another salt: a long run asks each once.
        refill: how many requests are ready to follow.
        salt: of this load: keeps its prefix-cache blocks apart from those of others (``cache_salt``).
        ids: token ids that random text is made of: plain words of the model's vocabulary.
        slots: requests that the server works on at once (``max_num_seqs``); what is beyond them waits in its
            queue, where every request is fresh. ``None``: not known, as many as are in flight.
        first: prompt with which to begin.
        max_model_len: prompt and answer together are no longer than this.

    Raises:
        ValueError: no prompt, or no id to make text of.
    """
    if not prompts or not ids:
        raise ValueError("a load needs prompts, and token ids to make text of")
    rng = random.Random(f"stationary {seed} {concurrency}")
    batch = concurrency if slots is None else max(1, min(concurrency, slots))
    pairs = in_flight(law, batch, rng)
    lengths = fresh_lengths(law, rng)
    asked = _asked(prompts, first, salt)
    text = _Text(ids, [age for _, age in pairs], salt)
    aged = [_request(*next(asked), length, age, text, max_model_len) for length, age in pairs]
    fresh = [_request(*next(asked), next(lengths), 0, text, max_model_len) for _ in range(concurrency - batch + refill)]
    return StationaryLoad(
        start=(*aged, *fresh[: concurrency - batch]),
        refill=tuple(fresh[concurrency - batch :]),
        kv_tokens=sum(len(request.prompt or ()) for request in aged),
        long_run=long_run(law, sum(len(p.tokens) for p in prompts) / len(prompts), batch),
        hit_share=shared_share(prompts),
    )


def shared_share(prompts: Sequence[Prompt]) -> float:
    """Of all prompt tokens, those in whole blocks with which another prompt begins, too (0..1)."""
    ordered = sorted(prompt.tokens for prompt in prompts)
    common = [0, *(_common(a, b) for a, b in itertools.pairwise(ordered)), 0]
    shared = sum(max(before, after) // BLOCK * BLOCK for before, after in itertools.pairwise(common))
    return shared / sum(map(len, ordered))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _asked(prompts: Sequence[Prompt], first: int, salt: str) -> Iterator[tuple[Prompt, str, str]]:
    """Prompts for ever, each with an id of its own and the salt that goes with it."""
    hashes = "#" * (1 + max(prompt.id.count("#") for prompt in prompts))
    for index in itertools.count():
        lap, prompt = index // len(prompts), prompts[(first + index) % len(prompts)]
        mark = f"{hashes}{lap + 1}" if lap else ""
        yield prompt, f"{prompt.id}{mark}", f"{salt}{mark}"


def _request(
    prompt: Prompt, name: str, salt: str, length: int, age: int, text: _Text, max_model_len: int | None
) -> Request:
    """An answer of ``length`` tokens of which the first ``age`` are written."""
    if max_model_len is not None:
        length = max(1, min(length, max_model_len - len(prompt.tokens)))
        age = min(age, length - 1)
    written = prompt.answer[:age] if len(prompt.answer) >= age else text.of(age)
    return Request(
        id=name,
        prompt=(*prompt.tokens, *written) if written else prompt.tokens,
        prompt_tokens=len(prompt.tokens),
        context_tokens=age,
        max_tokens=length - age,
        forced=True,
        salt=salt,
    )


class _Text:
    """Random text; each request gets another stretch of it."""

    def __init__(self, ids: Sequence[int], ages: Sequence[int], salt: str) -> None:
        # Stretches may overlap, but none begins where another does: only beginnings are found in a cache.
        self._ids = random.Random(f"text {salt}").choices(ids, k=max(ages) + BLOCK * len(ages))
        self._next = 0

    def of(self, tokens: int) -> Sequence[int]:
        """So many tokens, for one request."""
        begin, self._next = self._next, self._next + BLOCK
        return self._ids[begin : begin + tokens]
