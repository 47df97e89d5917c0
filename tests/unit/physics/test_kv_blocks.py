import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.kv_blocks import KvBlocks


class Naive:
    """Every sequence counted by itself: tokens in the cache, blocks held."""

    def __init__(self, total: int, size: int, tokens: list[int]) -> None:
        self.size, self.tokens = size, list(tokens)
        self.blocks = [-(-t // size) for t in tokens]
        self.free = total - sum(self.blocks)

    def need(self) -> int:
        return sum(-(-(t + 1) // self.size) > b for t, b in zip(self.tokens, self.blocks, strict=True))

    def step(self) -> None:
        self.free -= self.need()
        self.tokens = [t + 1 for t in self.tokens]
        self.blocks = [-(-t // self.size) for t in self.tokens]


def both(size: int, tokens: list[int], spare: int, step: int) -> tuple[KvBlocks, Naive]:
    held = sum(-(-t // size) for t in tokens)
    blocks = KvBlocks((held + spare) * size, size)
    blocks.free -= held
    for t in tokens:
        blocks.join(t - step)
    return blocks, Naive(held + spare, size, tokens)


cases = st.fixed_dictionaries(
    {
        "size": st.sampled_from([1, 8, 16]),
        "tokens": st.lists(st.integers(1, 200), min_size=1, max_size=12),
        "spare": st.integers(0, 60),
        "step": st.integers(0, 100),
    }
)


@given(case=cases, steps=st.integers(1, 70))
@settings(max_examples=50, deadline=None)
def test_many_steps_take_what_single_steps_take(case: dict[str, object], steps: int) -> None:
    size, tokens, step = case["size"], case["tokens"], case["step"]
    assert isinstance(size, int)
    assert isinstance(tokens, list)
    assert isinstance(step, int)
    blocks, naive = both(size, tokens, 1000, step)
    assert blocks.needed(step) == naive.need()
    for _ in range(steps):
        naive.step()
    blocks.grow(step, steps, len(tokens))
    assert blocks.free == naive.free
    assert blocks.needed(step + steps) == naive.need()
    assert blocks.usage == pytest.approx(1 - naive.free / blocks.total)


@given(case=cases)
@settings(max_examples=50, deadline=None)
def test_the_jump_ends_where_the_blocks_do(case: dict[str, object]) -> None:
    size, tokens, spare, step = case["size"], case["tokens"], case["spare"], case["step"]
    assert isinstance(size, int)
    assert isinstance(tokens, list)
    assert isinstance(spare, int)
    assert isinstance(step, int)
    blocks, naive = both(size, tokens, spare, step)
    possible = 0
    while naive.need() <= naive.free:
        naive.step()
        possible += 1
    assert blocks.steps_with_room(step, len(tokens)) == max(1, possible)


def test_who_leaves_needs_nothing() -> None:
    blocks = KvBlocks(160, 16)
    blocks.join(16)
    blocks.join(16)
    blocks.join(5)
    assert [blocks.needed(s) for s in (0, 11, 16)] == [2, 1, 2]
    blocks.leave(16)
    assert [blocks.needed(s) for s in (0, 11, 16)] == [1, 1, 1]


def test_blocks_of_tokens() -> None:
    blocks = KvBlocks(170, 16)
    assert (blocks.total, blocks.free, blocks.usage) == (10, 10, 0.0)
    assert [blocks.of(t) for t in (0, 1, 16, 17)] == [0, 1, 1, 2]
