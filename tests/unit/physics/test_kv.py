"""Blocks of the KV cache, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.physics.blocks import Block, Kv
from autotune.physics.kv import kv_element_bytes, kv_pool

FULL = Kv(kind="full", heads=8, width=256)  # 4 KiB a token in 16 bit
SLIDING = Kv(kind="sliding", heads=8, width=256, window=1024)
CHUNKED = Kv(kind="chunked", heads=8, width=256, window=1024)


def stage(*kvs: Kv) -> list[Block]:
    return [Block(weights=(), kv=(kv,)) for kv in kvs]


def test_one_kind_of_layer_is_one_group() -> None:
    pool = kv_pool(stage(*[FULL] * 4), element_bytes=2.0)
    assert pool.bytes_per_block == 4 * 16 * 4096
    assert pool.blocks(10 * pool.bytes_per_block + 1) == 10
    assert pool.blocks_per_request(17) == 2
    assert pool.tokens(10, 160) == 160
    assert pool.tokens(10, 24) == 120  # five requests of two blocks
    assert pool.longest(10, 1000) == 160
    assert pool.longest(10, 100) == 100
    assert pool.longest(0, 100) == 0
    assert pool.blocks(-5) == 0


def test_layers_of_one_kind_with_other_heads_share_a_group() -> None:
    pool = kv_pool(stage(FULL, Kv(kind="full", heads=2, width=256)), element_bytes=2.0)
    assert pool.bytes_per_block == 16 * (4096 + 1024)
    assert len(pool.groups) == 1


def test_windows_are_grouped_with_padding() -> None:
    # 2 full and 5 window layers: groups of 2, so 1 full and 3 window groups (one layer of padding)
    pool = kv_pool(stage(*[FULL] * 2, *[SLIDING] * 5), element_bytes=2.0)
    assert pool.bytes_per_block == 2 * 16 * 4096
    # decoding at 8192 tokens: 512 blocks, and 3 x (1023 tokens = 64 blocks, one more for a window within blocks)
    assert pool.blocks_per_request(8192) == 512 + 3 * 65
    # admission with a batch of 2048 in flight: 3071 tokens = 192 blocks and one
    assert pool.blocks_per_request(8192, 2048) == 512 + 3 * 193
    # a short request never holds more than itself
    assert pool.blocks_per_request(160, 2048) == 10 + 3 * 11


def test_windows_keep_everything_without_the_hybrid_manager() -> None:
    pool = kv_pool(stage(*[FULL] * 2, *[SLIDING] * 5), element_bytes=2.0, windows=False)
    assert pool.bytes_per_block == 7 * 16 * 4096
    assert pool.blocks_per_request(8192) == 512
    state = Kv(kind="state", state_elements=2**19)
    assert len(kv_pool(stage(FULL, state), element_bytes=2.0, windows=False).groups) == 2


def test_nearly_equal_counts_are_padded_up() -> None:
    # 12 window and 13 full layers (a drafter's): groups of 13
    pool = kv_pool(stage(*[FULL] * 13, *[SLIDING] * 12), element_bytes=2.0)
    assert pool.bytes_per_block == 13 * 16 * 4096
    assert [group.copies for group in pool.groups] == [1, 1]


def test_chunks_hold_their_chunk() -> None:
    pool = kv_pool(stage(FULL, CHUNKED, CHUNKED), element_bytes=2.0)
    assert pool.blocks_per_request(8192) == 512 + 2 * 64


def test_windows_alone() -> None:
    pool = kv_pool(stage(*[SLIDING] * 3), element_bytes=2.0)
    assert pool.blocks_per_request(10**6) == 65
    assert pool.tokens(650, 10**6) == 10 * 10**6


def test_different_heads_by_kind_get_longer_blocks() -> None:
    # a window layer of half the heads: its block holds twice the tokens
    narrow = Kv(kind="sliding", heads=4, width=256, window=1024)
    pool = kv_pool(stage(FULL, narrow), element_bytes=2.0)
    assert {group.kv.kind: group.block_tokens for group in pool.groups} == {"full": 16, "sliding": 32}


def test_states_enlarge_the_blocks() -> None:
    # a state of 1 MiB beside 4 KiB a token: blocks of 256 tokens
    state = Kv(kind="state", state_elements=2**19)
    pool = kv_pool(stage(FULL, state, state, state), element_bytes=2.0)
    assert pool.bytes_per_block == 2**20
    assert pool.blocks_per_request(1024) == 4 + 3
    only = kv_pool(stage(state, state), element_bytes=2.0)
    assert only.bytes_per_block == 2 * 2**20
    assert only.blocks_per_request(10**6) == 1


def test_no_layer_keeps_anything() -> None:
    pool = kv_pool([Block(weights=())], element_bytes=2.0)
    assert pool.blocks(100) == 1
    assert pool.blocks_per_request(100) == 1


def test_context_parallel_gpus_hold_their_part() -> None:
    pool = kv_pool(stage(FULL), element_bytes=2.0, context_parallel=4)
    assert pool.blocks_per_request(640) == 10


def test_tensor_parallel_divides_heads_down_to_one() -> None:
    for tp, expected in ((2, 4), (8, 1), (16, 1)):
        assert FULL.bytes_per_token(2.0, tp) == expected * 512
    assert Kv(kind="full", width=576, latent=True).bytes_per_token(2.0, 8) == 1152


def test_element_bytes() -> None:
    assert kv_element_bytes("fp8_e4m3") == 1.0
    assert kv_element_bytes("nvfp4") == 0.5625
    with pytest.raises(InputError, match="known are auto"):
        kv_element_bytes("half")


@settings(max_examples=50, deadline=None)
@given(
    full=st.integers(1, 6),
    sliding=st.integers(0, 12),
    blocks=st.integers(0, 5000),
    context=st.integers(1, 20000),
    in_flight=st.sampled_from([0, 512, 8192]),
)
def test_longest_is_exact_and_longer_requests_need_more(
    full: int, sliding: int, blocks: int, context: int, in_flight: int
) -> None:
    pool = kv_pool(stage(*[FULL] * full, *[SLIDING] * sliding), element_bytes=2.0)
    longest = pool.longest(blocks, 20000, in_flight)
    if longest:
        assert pool.blocks_per_request(longest, in_flight) <= blocks
    if longest < 20000:
        assert pool.blocks_per_request(longest + 1, in_flight) > blocks
    assert pool.blocks_per_request(context + 1, in_flight) >= pool.blocks_per_request(context, in_flight)
    assert pool.blocks_per_request(context, in_flight) >= pool.blocks_per_request(context)
