"""Rows to documents of tokens: conversations, and prompts with responses.

A document that is longer than a sequence is cut in its prompt, from the left. Earlier turns go
first, as wholes. An answer is never cut: if it does not fit, the row is rejected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from thinpipe.launch.data.chat.answers import Encoded, encode_chat
from thinpipe.launch.data.chat.messages import ASSISTANT, Message, tools_of
from thinpipe.launch.data.chat.template import ChatTemplate, TemplateError
from thinpipe.launch.data.documents import Document, Rejected
from thinpipe.launch.data.rows import Row, RowError
from thinpipe.launch.data.tokenizer import Tokenizer

LossOn = Literal["assistant", "last", "all"]
CUT_PROMPT = "prompts cut from the left to fit data.sequence_length"
CUT_TURNS = "conversations without their first turns, answers included, to fit data.sequence_length"
NO_TOOLS = "conversations with tools, of which the chat template writes nothing"
_TOO_LONG = "its answer is longer than data.sequence_length"


@dataclass(frozen=True)
class Limits:
    """The most tokens of a document, and which of its answers are learnt."""

    room: int
    loss_on: LossOn


def encode_prompt(
    row: Row, *, tokenizer: Tokenizer, read: Callable[[Row], tuple[str, str]], limits: Limits
) -> Document | Rejected:
    """A prompt and its response, which `read` gives, as plain text: nothing is put between them."""
    try:
        prompt, response = read(row)
    except RowError as error:
        return Rejected(row.where, str(error))
    asked = tokenizer.begun(tokenizer.encode(prompt))
    answer = tokenizer.encode(response, after=True)
    if not answer or answer[-1] not in tokenizer.ends:
        answer.append(tokenizer.end)
    whole = [*asked, *answer]
    first = max(len(asked), 1)  # the first token of all has nothing that predicts it
    return _fitted(row, whole, [(first, len(whole))], tokenizer, limits)


@dataclass(frozen=True)
class ChatEncoder:
    """Conversations, as a chat template writes them."""

    tokenizer: Tokenizer
    load: Callable[[], ChatTemplate]
    """Called when the first row is encoded."""
    read: Callable[[Row], list[Message]]
    """Gives a row's messages."""
    limits: Limits

    @cached_property
    def _template(self) -> ChatTemplate:
        return self.load()

    @cached_property
    def _ends(self) -> frozenset[int]:
        return answer_ends(self._template, self.tokenizer)

    @cached_property
    def _end_texts(self) -> list[str]:
        return [self.tokenizer.decode([end], special=True) for end in self._ends]

    def encode(self, row: Row) -> Document | Rejected:
        try:
            messages = [self._without_ends(message) for message in self.read(row)]
            tools = tools_of(row)
            found = self._tokens(messages, tools)
            remark = None
            while len(found.tokens) > self.limits.room:
                shorter = _without_first_turn(messages)
                if shorter is None:
                    break
                messages, remark = shorter, CUT_TURNS
                found = self._tokens(messages, tools)
            learnt = self._learnt(found, messages)
        except RowError as error:
            return Rejected(row.where, str(error))
        except TemplateError as error:
            return Rejected(row.where, f"the chat template rejects it ({error})")
        fitted = _fitted(row, found.tokens, learnt, self.tokenizer, self.limits, remark)
        if tools and isinstance(fitted, Document) and fitted.remark is None:
            knows = self._template.render(messages, tools) != self._template.render(messages)
            return fitted if knows else replace(fitted, remark=NO_TOOLS)
        return fitted

    def _tokens(self, messages: Sequence[Message], tools: list[Any] | None) -> Encoded:
        return encode_chat(
            messages, tools, template=self._template, tokenizer=self.tokenizer, ends=self._ends
        )

    def _learnt(self, found: Encoded, messages: Sequence[Message]) -> list[tuple[int, int]]:
        pairs = [*zip(found.answers, found.messages, strict=True)]
        if self.limits.loss_on == "last":
            pairs = pairs[-1:]
        learnt = [place for place, number in pairs if messages[number].get("weight", 1)]
        if not learnt:
            raise RowError("no answer is learnt, as their weights are 0")
        return learnt

    def _without_ends(self, message: Message) -> Message:
        """An answer may bring the end mark that the template will write."""
        content = message["content"]
        if message["role"] != ASSISTANT:
            return message
        for text in self._end_texts:
            content = content.removesuffix(text)
        return {**message, "content": content}


def answer_ends(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end an answer: those of the tokenizer, and what the template writes."""
    own = template.answer_end(tokenizer)
    return frozenset(tokenizer.ends if own is None else (*tokenizer.ends, own))


def _without_first_turn(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation from its second question on, behind what the system says."""
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if len(asked) < 2:
        return None
    head = [message for message in messages[: asked[0]] if message["role"] == "system"]
    rest = list(messages[asked[1] :])
    return [*head, *rest] if any(one["role"] == ASSISTANT for one in rest) else None


def _fitted(
    row: Row,
    tokens: list[int],
    learnt: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    limits: Limits,
    remark: str | None = None,
) -> Document | Rejected:
    """A document of at most `room` tokens, with all that is learnt."""
    begin = len(tokenizer.begin)
    first, last = learnt[0][0], learnt[-1][1]
    counts = np.zeros(len(tokens), dtype=bool)
    for start, stop in learnt:
        counts[start:stop] = True
    whole = np.asarray(tokens, dtype=np.int32)
    if len(whole) > limits.room:
        whole, counts = whole[:last], counts[:last]
    excess = len(whole) - limits.room
    if excess > 0:
        if excess > first - begin - 1:
            return Rejected(row.where, _TOO_LONG)
        kept = np.r_[:begin, begin + excess : len(whole)]
        whole, counts, remark = whole[kept], counts[kept], remark or CUT_PROMPT
    if limits.loss_on == "all":
        return Document(whole, None, remark)
    return Document(whole, counts, remark)
