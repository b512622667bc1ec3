"""Rows to documents of tokens: conversations, and prompts with responses.

A document that is longer than a sequence is cut in its prompt, from the left. Earlier turns go
first, as wholes. An answer is never cut: if it does not fit, the row is rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from thinpipe.launch.data.chat.answers import Places, encode_chat
from thinpipe.launch.data.chat.messages import (
    ASSISTANT,
    Message,
    messages_of,
    question_and_answer,
    tools_of,
)
from thinpipe.launch.data.chat.template import ChatTemplate, TemplateError, load_template
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document
from thinpipe.launch.data.rows import Row, RowError
from thinpipe.launch.data.tokenizer import Tokenizer

CUT_PROMPT = "prompts cut from the left to fit data.sequence_length"
CUT_TURNS = "conversations without their first turns, answers included, to fit data.sequence_length"
NO_TOOLS = "conversations with tools, of which the chat template writes nothing"


def encode_prompt(row: Row, *, config: DataConfig, tokenizer: Tokenizer) -> Document:
    """A prompt and its response as plain text: nothing is put between them."""
    prompt, response = _pair(config, row)
    asked = tokenizer.begun(tokenizer.encode(prompt))
    answer = tokenizer.encode(response, after=True)
    if not answer or answer[-1] not in tokenizer.ends:
        answer.append(tokenizer.end)
    whole = [*asked, *answer]
    first = max(len(asked), 1)  # the first token of all has nothing that predicts it
    return _fitted(whole, [(first, len(whole))], tokenizer, config)


@dataclass(frozen=True)
class ChatEncoder:
    """Conversations, as a chat template writes them."""

    config: DataConfig
    tokenizer: Tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        return load_template(self.config.chat_template, self.tokenizer)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return answer_ends(self._template, self.tokenizer)

    @cached_property
    def _end_texts(self) -> list[str]:
        return [self.tokenizer.decode([end], special=True) for end in self._ends]

    def encode(self, row: Row) -> Document:
        messages = [self._without_ends(message) for message in _messages(self.config, row)]
        tools = tools_of(row)
        tokens, answers = self._tokens(messages, tools)
        remark = None
        while len(tokens) > self.config.sequence_length + 1:
            shorter = _without_first_turn(messages)
            if shorter is None:
                break
            messages, remark = shorter, CUT_TURNS
            tokens, answers = self._tokens(messages, tools)
        learnt = self._learnt(answers, messages)
        fitted = _fitted(tokens, learnt, self.tokenizer, self.config, remark)
        if tools and fitted.remark is None:
            knows = self._template.render(messages, tools) != self._template.render(messages)
            return fitted if knows else replace(fitted, remark=NO_TOOLS)
        return fitted

    def _tokens(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[list[int], Places]:
        try:
            return encode_chat(
                messages, tools, template=self._template, tokenizer=self.tokenizer, ends=self._ends
            )
        except TemplateError as error:
            raise RowError(f"the chat template rejects it ({error})") from error

    def _learnt(self, answers: Places, messages: Sequence[Message]) -> Places:
        spoken = [message for message in messages if message["role"] == ASSISTANT]
        first = -1 if self.config.loss_on == "last" else 0
        pairs = zip(answers[first:], spoken[first:], strict=True)
        learnt = [place for place, message in pairs if message.get("weight", 1)]
        if not learnt:
            raise RowError("no answer is learnt, as their weights are 0")
        return learnt

    def _without_ends(self, message: Message) -> Message:
        """An answer may bring the end mark that the template will write."""
        if message["role"] != ASSISTANT:
            return message
        content = message["content"]
        for text in self._end_texts:
            content = content.removesuffix(text)
        return {**message, "content": content}


def answer_ends(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end an answer: those of the tokenizer, and what the template writes."""
    own = template.answer_end(tokenizer)
    return frozenset(tokenizer.ends if own is None else (*tokenizer.ends, own))


def _messages(config: DataConfig, row: Row) -> list[Message]:
    if config.messages_field is not None:
        return messages_of(row, config.messages_field)
    first = config.prompt_fields[0]
    if isinstance(row.fields.get(first), list) and config.response_field is not None:
        return question_and_answer(row, first, config.response_field)
    prompt, response = _pair(config, row)
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response}]


def _pair(config: DataConfig, row: Row) -> tuple[str, str]:
    """Prompt and response of a row; several prompt fields are joined by blank lines."""
    assert config.response_field is not None, "checked with the config"
    first, *others = config.prompt_fields
    given = [field for field in others if row.fields.get(field) is not None]
    parts = [row.text(first), *(row.text(field, blank=True) for field in given)]
    return "\n\n".join(part for part in parts if part.strip()), row.text(config.response_field)


def _without_first_turn(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation from its second question on, behind what the system says."""
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if len(asked) < 2:
        return None
    head = [message for message in messages[: asked[0]] if message["role"] == "system"]
    rest = list(messages[asked[1] :])
    return [*head, *rest] if any(one["role"] == ASSISTANT for one in rest) else None


def _fitted(
    tokens: list[int],
    learnt: Places,
    tokenizer: Tokenizer,
    config: DataConfig,
    remark: str | None = None,
) -> Document:
    """A document that fits into a sequence, with all that is learnt."""
    begin, room = len(tokenizer.begin), config.sequence_length + 1
    first, last = learnt[0][0], learnt[-1][1]
    counts = np.zeros(len(tokens), dtype=bool)
    for start, stop in learnt:
        counts[start:stop] = True
    whole = np.asarray(tokens, dtype=np.int32)
    if len(whole) > room:
        whole, counts = whole[:last], counts[:last]
    excess = len(whole) - room
    if excess > 0:
        if excess > first - begin - 1:
            raise RowError("its answer is longer than data.sequence_length")
        kept = np.r_[:begin, begin + excess : len(whole)]
        whole, counts, remark = whole[kept], counts[kept], remark or CUT_PROMPT
    return Document(whole, None if config.loss_on == "all" else counts, remark)
