"""Prompt tokens with the chat template, on a tokenizer that the test makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.records.load import Message
from autotune.workloads import tokens
from autotune.workloads.base import Question
from autotune.workloads.quiet import quiet
from autotune.workloads.tokens import TokenCounter

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
    "<turn> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} <think> <think>{% endif %}"
)


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> str:
    """A tokenizer of whole words that adds <start> unless it is told not to."""
    with quiet():
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<start>", "<turn>", "<reply>", "<think>", "one", "two", "three"]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 1)])
    with quiet():
        made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
        made.chat_template = template
        made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with quiet():
        import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    yield
    tokens._tokenizer.cache_clear()


def ask(number: int, text: str, role: str = "user") -> Question:
    return Question(id=f"q{number}", messages=(Message(role=role, content=text),))


QUESTIONS = (ask(0, "one"), ask(1, "one two three"), Question(id="ids", prompt=(5, 6, 7, 8)))


def test_counts_with_the_chat_template(model: str) -> None:
    # <turn> words <reply>: the template's tokens are in, the tokenizer's own <start> is not added again.
    assert TokenCounter(model).count(QUESTIONS) == {"ids": 4, "q0": 3, "q1": 5}


def test_ids_are_what_is_counted(model: str) -> None:
    counter = TokenCounter(model)
    ids = counter.ids(QUESTIONS)
    assert ids is not None
    assert {name: len(tokens) for name, tokens in ids.items()} == counter.count(QUESTIONS)
    assert ids["ids"] == (5, 6, 7, 8)
    assert ids["q1"][0] == ids["q0"][0]
    assert counter.text_ids("two three") == ids["q1"][2:4]
    assert TokenCounter("nobody/nothing").text_ids("two") is None
    assert TokenCounter("nobody/nothing", remote=lambda _: (1, 2)).ids(QUESTIONS[:1]) == {"q0": (1, 2)}


def test_agrees_with_the_library_one_by_one(model: str) -> None:
    with quiet():
        from transformers import AutoTokenizer

        library = AutoTokenizer.from_pretrained(model)
    for question, counted in zip(QUESTIONS, (3, 5), strict=False):
        chat = [{"role": m.role, "content": m.content} for m in question.messages]
        assert len(library.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) == counted


def test_chat_template_arguments_count(model: str) -> None:
    counter = TokenCounter(model, chat_template_kwargs={"enable_thinking": False})
    assert counter.count(QUESTIONS[:1]) == {"q0": 5}


def test_a_template_that_refuses_is_told(model: str) -> None:
    with pytest.raises(InputError, match="refuses these messages: no system message here") as caught:
        TokenCounter(model).count([ask(0, "one", role="system")])
    assert caught.value.hint


@pytest.mark.parametrize("broken", ["{{{", '{"a": 1}', None])
def test_without_a_tokenizer_the_server_counts(tmp_path: Path, model: str, broken: str | None) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if broken is None:
        (tmp_path / "tokenizer.json").unlink()
    else:
        (tmp_path / "tokenizer.json").write_text(broken)
    counter = TokenCounter(str(tmp_path), remote=lambda messages: range(100 + len(messages[0].content)))
    assert counter.count(QUESTIONS) == {"ids": 4, "q0": 103, "q1": 113}
    assert TokenCounter(str(tmp_path)).count(QUESTIONS) is None


def test_without_a_chat_template_the_server_counts(tmp_path: Path) -> None:
    plain = make_tokenizer(tmp_path, template=None)
    assert TokenCounter(plain).count(QUESTIONS) is None
    assert TokenCounter(plain, remote=lambda _: range(7)).count(QUESTIONS) == {"ids": 4, "q0": 7, "q1": 7}


def test_a_server_that_cannot_count() -> None:
    assert TokenCounter("nobody/nothing", remote=lambda _: None).count(QUESTIONS) is None


def test_token_ids_need_no_tokenizer() -> None:
    assert TokenCounter("nobody/nothing").count(QUESTIONS[2:]) == {"ids": 4}


def test_nothing_is_said_and_the_environment_stays(model: str) -> None:
    """2,500 prompts in a fresh process: silence, also when it forks afterwards, and no variable left behind."""
    code = (
        "import json, os, sys\n"
        "before = dict(os.environ)\n"
        "from autotune.records.load import Message\n"
        "from autotune.workloads.base import Question\n"
        "from autotune.workloads.tokens import TokenCounter\n"
        "q = [Question(id=str(n), messages=(Message(role='user', content='one two ' * 50),)) for n in range(2500)]\n"
        f"counts = TokenCounter({model!r}).count(q)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(json.dumps([len(counts), counts['7'], dict(os.environ) == before]))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [2500, 102, True]
