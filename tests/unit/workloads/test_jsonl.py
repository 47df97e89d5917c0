"""JSON lines: what is read, what is refused and how that is told; fuzzed."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.records.load import Message
from autotune.records.trial import WorkloadSpec
from autotune.workloads import jsonl
from autotune.workloads.base import Source


def read(path: Path, content: bytes | str) -> Source:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return jsonl.read(WorkloadSpec(name="jsonl", path=str(path)))


def lines(*objects: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def test_all_keys(file: Path) -> None:
    first, second = read(
        file,
        lines(
            {"id": "a", "category": "history", "prompt": "When?", "max_tokens": 64, "answer": "1848"},
            {
                "id": 7,
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "else?"}]},
                ],
                "answer": 2.5,
            },
        ),
    ).questions
    assert first.messages == (Message(role="user", content="When?"),)
    assert (first.id, first.category, first.max_tokens, first.answer) == ("a", "history", 64, "1848")
    assert second.messages == (
        Message(role="system", content="Be short."),
        Message(role="user", content="Who\nelse?"),
    )
    assert (second.id, second.category, second.max_tokens, second.answer) == ("7", None, None, "2.5")


def test_bom_crlf_blank_lines_and_a_last_line_without_an_end(file: Path) -> None:
    content = b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\r\n\r\n   \r\n{"id": "b", "prompt": "y"}'
    assert [(q.id, q.messages[0].content) for q in read(file, content).questions] == [("a", "x"), ("b", "y")]


def test_line_separators_inside_text_do_not_end_a_line(file: Path) -> None:
    text = "one\u2028two\u0085three\x0cfour"
    content = json.dumps({"prompt": text}, ensure_ascii=False)
    assert read(file, content).questions[0].messages[0].content == text


def test_lines_without_id_are_named_after_their_content(file: Path) -> None:
    alone = read(file, lines({"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}))
    later = read(file, lines({"id": None, "prompt": "new"}, {"prompt": "x"}, {"prompt": "y"}))
    first, second, again = (q.id for q in alone.questions)
    assert again == f"{first}-2"
    assert [q.id for q in later.questions][1:] == [first, second]


def test_unknown_keys_are_told(file: Path) -> None:
    source = read(file, lines({"prompt": "x", "max_token": 5}, {"prompt": "y", "level": 1, "max_token": 5}))
    assert source.notes == (f'{file}: keys that mean nothing here: "level", "max_token"',)
    assert read(file, lines({"prompt": "x"})).notes == ()


def test_provenance_names_the_content(file: Path) -> None:
    one = read(file, lines({"prompt": "x"})).provenance
    other = read(file, lines({"prompt": "y"})).provenance
    assert one["source"] == str(file)
    assert str(one["revision"]).startswith("sha256:")
    assert one["revision"] != other["revision"]


def test_stdin_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl._stdin.cache_clear()
    stream = io.TextIOWrapper(io.BytesIO(lines({"id": "a", "prompt": "x"}).encode()))
    monkeypatch.setattr("sys.stdin", stream)
    try:
        twice = [jsonl.read(WorkloadSpec(name="jsonl", path="-", limit=limit)) for limit in (1, 2)]
    finally:
        jsonl._stdin.cache_clear()
    assert [source.questions[0].id for source in twice] == ["a", "a"]
    assert twice[0].provenance["source"] == "stdin"


PART = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no question"),
        ("\n \r\n", "holds no question"),
        ('{"prompt": "x"}\n{"prompt": "x"', "line 2: not JSON"),
        ('{"prompt": "x"}\n"text"', 'line 2: a line is one JSON object, got "text"'),
        ('[{"prompt": "x"},', "jq -c '.[]'"),
        ('[{"prompt": "x"}]', "jq -c '.[]'"),
        ('{\n"prompt": "x"\n}', "jq -c ."),
        ('{"prompt": "x", "max_tokens": NaN}', "NaN is no JSON number"),
        ('{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "caf\xe9"}', "line 1: not UTF-8 text (byte 16, 0xe9)"),
        ("\ufeff{}".encode("utf-16"), "iconv -f utf-16"),
        ("{}", "exactly one of prompt and messages is needed, got neither"),
        ('{"prompt": "x", "messages": []}', "got both"),
        ('{"prompt": 5}', "prompt is text that is not empty, got 5"),
        ('{"prompt": " \\n"}', "prompt is text that is not empty"),
        ('{"prompt": "\\ud800"}', 'half a surrogate pair, which is no text, got "\\ud800"'),
        ('{"prompt": "x", "id": ""}', "id is text that is not empty"),
        ('{"prompt": "x", "id": true}', "id is text that is not empty, got true"),
        ('{"prompt": "x", "category": 1}', "category is text"),
        ('{"prompt": "x", "answer": ["a"]}', "answer is text that is not empty, got a list"),
        ('{"prompt": "x", "answer": false}', "answer is text that is not empty, got false"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is a whole number of at least 1, got 0"),
        ('{"prompt": "x", "max_tokens": 5.0}', "got 5.0"),
        ('{"prompt": "x", "max_tokens": true}', "got true"),
        ('{"messages": []}', "messages is a list of at least one message"),
        ('{"messages": "hello"}', 'got "hello"'),
        ('{"messages": ["hello"]}', "messages[0] is an object with role and content"),
        ('{"messages": [{"content": "x"}]}', "messages[0].role is one of system, developer, user, assistant, got null"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', 'got "tool"'),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content is text"),
        ('{"messages": [{"role": "user", "content": []}]}', "messages[0].content is text"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "messages[0].content[0] is a part with a type"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "content[0].text is text"),
        (lines({"messages": [{"role": "user", "content": [PART]}]}), 'of type "image_url": only text can be asked'),
        ('{"id": "a", "prompt": "x"}\n\n{"id": "a", "prompt": "y"}', 'line 3: id "a" is already used in line 1'),
        ('{"id": 1, "prompt": "x"}\n{"id": "1", "prompt": "y"}', 'line 2: id "1" is already used in line 1'),
        ('{"prompt": "x", "category": "' + "y" * 200 + "\\ud800" + '"}', "..."),
    ],
)
def test_refusals_name_line_rule_value_and_a_hint(file: Path, content: bytes | str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read(file, content)
    assert says in str(caught.value)
    assert caught.value.message.startswith(str(file))
    assert caught.value.hint
    str(caught.value).encode()


@pytest.mark.parametrize("path", [None, "/no/such/file.jsonl", "nul\0byte.jsonl", "/"])
def test_files_that_cannot_be_read(path: str | None) -> None:
    with pytest.raises(InputError) as caught:
        jsonl.read(WorkloadSpec(name="jsonl", path=path))
    assert caught.value.hint == "--workload FILE.jsonl, or --workload - for stdin"


def accepted_or_refused(content: bytes) -> Source | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = read(Path(folder) / "fuzz.jsonl", content)
        except InputError as error:
            refusal = error
        else:
            refusal = None
    if refusal is not None:
        assert refusal.hint
        str(refusal).encode()
        return None
    assert len({q.id for q in source.questions}) == len(source.questions) > 0
    for question in source.questions:
        assert question.messages
        assert all(message.content.encode() for message in question.messages)
    return source


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf")
@example(b'{"prompt": "\x00"}')
def test_fuzz_bytes(content: bytes) -> None:
    accepted_or_refused(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONTENT = JSON | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": JSON})
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.sampled_from([*jsonl.ROLES, "tool", 3]), "content": CONTENT})
LINE = st.fixed_dictionaries(
    {},
    optional={
        "prompt": JSON,
        "messages": JSON | st.lists(MESSAGE, max_size=3),
        "id": JSON,
        "category": JSON,
        "max_tokens": JSON,
        "answer": JSON,
        "other": JSON,
    },
)


@settings(max_examples=50, deadline=None)
@given(st.lists(LINE | JSON, min_size=1, max_size=4))
def test_fuzz_objects(objects: list[Any]) -> None:
    accepted_or_refused(lines(*objects).encode())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20).filter(str.strip), st.integers(1, 10**6)), min_size=1, max_size=5
    )
)
def test_what_is_written_is_read_back(items: list[tuple[str, int]]) -> None:
    content = lines(*({"id": str(n), "prompt": text, "max_tokens": limit} for n, (text, limit) in enumerate(items)))
    source = accepted_or_refused(content.encode())
    assert source is not None
    assert [(q.messages[0].content, q.max_tokens) for q in source.questions] == items
