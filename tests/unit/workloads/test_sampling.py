"""Fair samples, and what fits the context."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.records.load import Message
from autotune.workloads.base import Question
from autotune.workloads.sampling import admit, aside_note, sample


def question(number: int, category: str | None = None, size: int = 10, max_tokens: int | None = None) -> Question:
    return Question(
        id=f"q{number}",
        messages=(Message(role="user", content="x" * size),),
        category=category,
        max_tokens=max_tokens,
    )


def made(sizes: dict[str, int]) -> list[Question]:
    categories = [category for category, number in sizes.items() for _ in range(number)]
    return [question(n, category, size=10 + n * 37 % 500) for n, category in enumerate(categories)]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 40), min_size=1),
    st.integers(1, 200),
    st.integers(0, 10**6),
)
def test_size_order_and_shares(sizes: dict[str, int], n: int, seed: int) -> None:
    questions = made(sizes)
    chosen = sample(questions, n, seed)
    assert len(chosen) == min(n, len(questions))
    assert list(chosen) == [q for q in questions if q in chosen], "in the order of the set"
    assert chosen == sample(questions, n, seed)
    found = Counter(q.category for q in chosen)
    for category, size in sizes.items():
        assert abs(found[category] - min(n, len(questions)) * size / len(questions)) < 1


def test_another_seed_is_another_sample() -> None:
    questions = made({"a": 100, "b": 50})
    assert len({sample(questions, 15, seed) for seed in range(5)}) == 5


def test_lengths_are_stratified_inside_a_category() -> None:
    questions = [question(n, "a", size=1 + n) for n in range(100)]
    for seed in range(20):
        sizes = sorted(q.size for q in sample(questions, 10, seed))
        assert [(size - 1) // 10 for size in sizes] == list(range(10)), "one from each tenth"


def test_token_counts_replace_characters_where_they_are_known() -> None:
    questions = [question(n, "a", size=1) for n in range(40)]
    lengths = {q.id: (7 * n) % 40 for n, q in enumerate(questions)}
    for seed in range(5):
        drawn = sorted(lengths[q.id] for q in sample(questions, 4, seed, lengths=lengths))
        assert [tokens // 10 for tokens in drawn] == [0, 1, 2, 3]


def test_every_question_has_the_same_chance() -> None:
    questions = made({"a": 11, "b": 7})
    drawn = Counter(q.id for seed in range(3000) for q in sample(questions, 6, seed))
    assert len(drawn) == 18
    # 3,000 draws of 6 from 18: 1,000 each; shares by category are 3.67 and 2.33, rounded by the remainder.
    for category, size, share in (("a", 11, 4), ("b", 7, 2)):
        expected = 3000 * share / size
        counts = [drawn[q.id] for q in questions if q.category == category]
        assert max(abs(count - expected) for count in counts) < 5 * expected**0.5


def test_questions_without_a_category_are_a_category() -> None:
    questions = [question(n, None if n % 2 else "a") for n in range(20)]
    assert Counter(q.category for q in sample(questions, 10, 0)) == {None: 5, "a": 5}


def test_admit_sets_aside_what_does_not_fit() -> None:
    questions = [question(0), question(1), question(2, max_tokens=10), question(3)]
    lengths = {"q0": 924, "q1": 925, "q2": 1014, "q3": 1015}
    admitted, aside = admit(questions, lengths, 1024, 100)
    assert [q.id for q in admitted] == ["q0", "q2"]
    assert [q.id for q in aside] == ["q1", "q3"]
    assert aside_note(aside, lengths) == (
        "2 prompts longer than max_model_len - max_tokens are not sent: q3 (1015 tokens), q1 (925 tokens)"
    )


def test_a_long_note_is_cut() -> None:
    questions = [question(n) for n in range(8)]
    lengths = {q.id: 100 + n for n, q in enumerate(questions)}
    assert aside_note(questions, lengths).endswith("q4 (104 tokens), q3 (103 tokens) and 3 more")


def test_what_is_not_known_sets_nothing_aside() -> None:
    questions = (question(0), question(1))
    assert admit(questions, None, 10, 5) == (questions, ())
    assert admit(questions, {"q0": 100, "q1": 100}, None, 5) == (questions, ())
    assert admit(questions, {"q0": 100}, 50, 5) == (questions[1:], questions[:1])
