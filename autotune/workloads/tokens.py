"""Prompts as token ids, as the server will see them: chat template applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.records.load import Message
from autotune.workloads.base import Question
from autotune.workloads.quiet import quiet

Remote = Callable[[Sequence[Message]], Sequence[int] | None]
"""Tokenises one conversation elsewhere: the server's ``/tokenize``; ``None`` where it cannot."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)
"""What transformers raises for a tokenizer that is missing, gated, broken, or needs code of its own."""


class TokenCounter:
    """Tokenises with the model's own tokenizer, or with the server where there is none here."""

    def __init__(
        self,
        model: str,
        *,
        chat_template_kwargs: Mapping[str, bool | int | float | str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        """Set up; nothing is read before the first count.

        Args:
            model: hub name or folder.
            chat_template_kwargs: arguments of the chat template, such as ``enable_thinking``.
            remote: asked when no tokenizer with a chat template is at hand.
        """
        self._model = model
        self._arguments = dict(chat_template_kwargs or {})
        self._remote = remote

    def count(self, questions: Sequence[Question]) -> dict[str, int] | None:
        """Prompt tokens by question id; ``None``, errors: as ``ids``."""
        ids = self.ids(questions)
        return None if ids is None else {name: len(tokens) for name, tokens in ids.items()}

    def ids(self, questions: Sequence[Question]) -> dict[str, tuple[int, ...]] | None:
        """Token ids by question id; ``None`` where neither a tokenizer nor a server can tell.

        The tokenizer comes from the folder or the local cache, else from the hub. Prompts that are token ids
        already need none.

        Raises:
            InputError: the model's chat template refuses the messages.
        """
        given = {q.id: q.prompt for q in questions if q.prompt is not None}
        chats = [q for q in questions if q.prompt is None]
        if not chats:
            return given
        tokenizer = _tokenizer(self._model)
        found = self._there(chats) if tokenizer is None else self._here(tokenizer, chats)
        if found is None:
            return None
        return given | {q.id: ids for q, ids in zip(chats, found, strict=True)}

    def text_ids(self, text: str) -> tuple[int, ...] | None:
        """Token ids of plain text, an answer's for instance; ``None`` without a tokenizer here."""
        tokenizer = _tokenizer(self._model)
        if tokenizer is None:
            return None
        with quiet():
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _there(self, chats: Sequence[Question]) -> list[tuple[int, ...]] | None:
        found: list[tuple[int, ...]] = []
        for question in chats:
            ids = None if self._remote is None else self._remote(question.messages)
            if ids is None:
                return None
            found.append(tuple(ids))
        return found

    def _here(self, tokenizer: Any, chats: Sequence[Question]) -> list[tuple[int, ...]]:
        from jinja2.exceptions import TemplateError

        conversations = [[{"role": m.role, "content": m.content} for m in q.messages] for q in chats]
        try:
            with quiet():
                texts = tokenizer.apply_chat_template(
                    conversations, tokenize=False, add_generation_prompt=True, **self._arguments
                )
                # The template has written the special tokens already, as vLLM's chat route assumes, too.
                encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        except TemplateError as error:
            raise InputError(
                f"the chat template of {self._model} refuses these messages: {error}",
                hint="some models take no system message: put its text into the user message of a JSONL workload",
            ) from error
        return [tuple(ids) for ids in encoded["input_ids"]]


@functools.cache
def _tokenizer(model: str) -> Any:
    """A tokenizer with a chat template, or ``None``; looked for once in a process (a hub out of reach costs 45 s)."""
    with quiet():
        from transformers import AutoTokenizer

        for local in (True,) if Path(model).is_dir() else (True, False):
            try:
                found = AutoTokenizer.from_pretrained(model, local_files_only=local, trust_remote_code=False)
            except UNREADABLE:
                continue
            return found if found.chat_template else None
    return None
