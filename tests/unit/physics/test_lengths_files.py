import json

import pytest

from autotune.errors import InputError
from autotune.physics.lengths_files import parse_lengths
from autotune.records import codec
from autotune.records.lengths import AnswerLength, Lengths


def read(text: str, **options: int) -> list[tuple[int, bool]]:
    return [(a.tokens, a.ended) for a in parse_lengths(text, source="file", **options).answers]


def test_our_own_file_comes_back_as_it_was() -> None:
    own = Lengths(
        prompt_tokens=(5,),
        answers=(AnswerLength(tokens=7, ended=False),),
        max_tokens=7,
        source="probe",
        fingerprint="a",
    )
    assert parse_lengths(codec.dumps(own, indent=1), source="x") == own


def test_our_own_file_that_is_broken_is_named() -> None:
    with pytest.raises(InputError, match="lengths.json: Lengths.answers is missing"):
        parse_lengths('{"schema": "autotune/lengths/1", "prompt_tokens": []}', source="lengths.json")


@pytest.mark.parametrize(
    "text", ["[10, 20, 30]", "10\n20\n30\n", "10 20, 30", "# tokens\n10\n20\n30", "\ufeff[10,20,30]"]
)
def test_plain_numbers(text: str) -> None:
    assert read(text) == [(10, True), (20, True), (30, True)]


def test_csv_with_reasons_and_prompts() -> None:
    text = "id,output_tokens,prompt_tokens,finish_reason\na,100,11,stop\nb,200,12,length\nc,,13,\n"
    found = parse_lengths(text, source="x")
    assert [(a.tokens, a.ended) for a in found.answers] == [(100, True), (200, False)]
    assert found.prompt_tokens == (11, 12)
    assert found.max_tokens == 200


def test_csv_with_ended() -> None:
    assert read("completion_tokens,ended\n5,true\n6,False\n7,0\n") == [(5, True), (6, False), (7, False)]


def test_json_lines_with_usage() -> None:
    rows = [
        {"usage": {"completion_tokens": 9, "prompt_tokens": 4}, "finish_reason": "length"},
        {"output_tokens": 8, "finish_reason": "stop"},
    ]
    assert read("\n".join(map(json.dumps, rows))) == [(9, False), (8, True)]


def test_one_object_and_objects_by_id() -> None:
    assert read('{"output_tokens": 8, "finish_reason": "stop"}') == [(8, True)]
    assert read('{"q1": {"tokens": 8}, "q2": {"usage": {"completion_tokens": 9}}}') == [(8, True), (9, True)]


def test_result_of_vllm_bench_serve() -> None:
    found = parse_lengths('{"output_lens": [5, 6], "input_lens": [1, 2], "duration": 3}', source="x")
    assert [a.tokens for a in found.answers] == [5, 6]
    assert found.prompt_tokens == (1, 2)


def test_a_known_limit_tells_which_were_cut() -> None:
    assert read("5 10 10 12", max_tokens=10) == [(5, True), (10, False), (10, False), (12, False)]


def test_many_of_the_greatest_length_were_cut_there() -> None:
    assert read("5 10 10 10") == [(5, True), (10, False), (10, False), (10, False)]
    assert read("5 10 10") == [(5, True), (10, True), (10, True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("[]", "no answer lengths"),
        ("output_tokens\n", "no answer lengths"),
        ("10\nten\n", "entry 2: a length is a number of tokens"),
        ("[true]", "entry 1"),
        ("[-1]", "got -1"),
        ('[{"output_tokens": "nan"}]', "entry 1"),
        ('{"output_tokens": 5}\n{"broken"\n', "line 2: not a JSON object"),
    ],
)
def test_what_is_no_list_of_lengths_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_lengths(text, source="lengths.txt")
