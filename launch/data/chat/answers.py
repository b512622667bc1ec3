"""Which tokens of a conversation the assistant wrote, and so has to learn.

A template with `{% generation %}` marks says so itself. For any other, two renderings are compared
with the whole one, for every conversation. The text up to an answer, as `generate` would be
given it, must be how the whole begins; and with a marker in place of each answer, the rest must be
the same. Where neither holds, or they contradict each other, the row is rejected.

An answer ends with the template's end mark, which is learnt; what follows it is not.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from thinpipe.launch.data.chat.messages import ASSISTANT, Message
from thinpipe.launch.data.chat.template import ChatTemplate, TemplateError
from thinpipe.launch.data.rows import RowError
from thinpipe.launch.data.tokenizer import Tokenizer

Place = tuple[int, int]
Places = list[Place]


@dataclass(frozen=True)
class _Answer:
    """An answer in characters, from `start` on; `content` is the message's own text, if known."""

    message: int
    start: int
    content: tuple[int, int] | None


class _Text:
    """A written-out conversation, and its tokens with their places."""

    def __init__(self, text: str, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.text, self._tokenizer = text, tokenizer
        self.tokens, self.places = tokenizer.spans(text)
        pairs = zip(self.tokens, self.places, strict=True)
        self._ends = [place for token, place in pairs if token in ends]

    def end_mark(self, first: int, last: int) -> Place | None:
        at = bisect_left(self._ends, (first, 0))
        return next((mark for mark in self._ends[at : at + 1] if mark[0] < last), None)

    def cut(self, places: Sequence[int]) -> None:
        """Insert the tokenizer's end mark at these places, which a template leaves without."""
        tokens, spans = list[int](), Places()
        bounds = [0, *places, len(self.text)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            ids, own = self._tokenizer.spans(self.text[first:last], after=number > 0)
            tokens += ids
            spans += [(first + start, first + stop) for start, stop in own]
            if number < len(places):
                tokens.append(self._tokenizer.end)
                spans.append((last, last))
        self.tokens, self.places = tokens, spans

    def range(self, start: int, stop: int) -> Place:
        """The tokens of a piece of text; one that begins in the blanks before it belongs to it."""
        first = bisect_left(self.places, (start, start + 1))
        while first > 0 and self.places[first - 1][1] > start:
            first -= 1
        last = bisect_left(self.places, (stop, stop))
        while last < len(self.places) and self.places[last] == (stop, stop):
            last += 1  # an end mark that was inserted
        if first >= last:
            raise RowError("an answer has no token of its own")
        if self.text[self.places[first][0] : start].strip():
            raise RowError("a token holds the end of a prompt and the beginning of its answer")
        return first, last


def encode_chat(
    messages: Sequence[Message],
    tools: list[Any] | None,
    *,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    ends: frozenset[int],
) -> tuple[list[int], Places]:
    """The tokens of a conversation, with BOS if the tokenizer adds one, and each answer's range.

    `ends` are tokens that end an answer.

    Raises:
        TemplateError: the template does not take the messages.
        RowError: its answers cannot be told apart.
    """
    chat = _Chat(messages, tools, template)
    if template.marks_answers:
        text, places = template.marked(messages, tools)
        spoken = sum(message["role"] == ASSISTANT for message in messages)
        if len(places) != spoken:
            raise RowError(f"the template marks {len(places)} answers of {spoken} as generated")
        whole = _Text(text, tokenizer, ends)
    else:
        whole = _Text(chat.text(messages), tokenizer, ends)
        places = chat.places(whole)
    chat.check_calls(whole.text)
    ranges = [whole.range(*place) for place in places]
    tokens = tokenizer.begun(whole.tokens)
    shift = len(tokens) - len(whole.tokens)
    return tokens, [(first + shift, last + shift) for first, last in ranges]


@dataclass(frozen=True)
class _Chat:
    """A conversation, of which parts and variants are rendered."""

    messages: Sequence[Message]
    tools: list[Any] | None
    template: ChatTemplate

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, prompt=prompt)

    def check_calls(self, text: str) -> None:
        """A template that knows no calls of tools would teach to answer with nothing."""
        for number, message in enumerate(self.messages):
            if message["role"] != ASSISTANT or not message.get("tool_calls"):
                continue
            silent = {name: value for name, value in message.items() if name != "tool_calls"}
            try:
                without = self.text([*self.messages[:number], silent, *self.messages[number + 1 :]])
            except TemplateError:
                continue  # it needs them
            if without == text:
                raise RowError("the chat template writes nothing of a call of tools")

    def places(self, whole: _Text) -> Places:
        """Where the answers are, with their end marks, which are inserted if there are none."""
        answers = self._answers(whole.text)
        following = [*(answer.start for answer in answers[1:]), len(whole.text)]
        found, missing = Places(), []
        for answer, limit in zip(answers, following, strict=True):
            first, after = answer.content or (answer.start, answer.start)
            if answer.content and whole.end_mark(first, after):
                raise RowError("an answer holds an end mark before its end")
            mark = whole.end_mark(after, limit)
            if mark is not None and not (answer.content and whole.text[after : mark[0]].strip()):
                found.append((answer.start, mark[1]))
                continue
            stop = after if answer.content else self._whole_stop(whole.text, answer)
            missing.append(stop)
            found.append((answer.start, stop))
        if missing:
            whole.cut(missing)
        return found

    def _whole_stop(self, text: str, answer: _Answer) -> int:
        """Where a message ends that is a call of tools, in a template without end marks."""
        upto = self.text(self.messages[: answer.message + 1])
        if not text.startswith(upto):
            raise RowError("it cannot be told where the template ends an answer")
        return len(upto)

    def _answers(self, text: str) -> list[_Answer]:
        contents, at = self._contents(text), 0
        found = list[_Answer]()
        for number, message in enumerate(self.messages):
            if message["role"] != ASSISTANT:
                continue
            content = contents.get(number)
            limit = content[0] if content else len(text)
            start = self._prompt_length(text, self.messages[:number])
            if start is None or not at <= start <= limit:
                if content is None:
                    raise RowError("it cannot be told where the template begins an answer")
                start = content[0]
            found.append(_Answer(number, start, content))
            at = content[1] if content else start
        return found

    def _prompt_length(self, text: str, before: Sequence[Message]) -> int | None:
        """Length of what `generate` is given to write this answer, if the text begins with that."""
        try:
            prompt = self.text(before, prompt=True) if before else ""
        except TemplateError:
            return None
        return len(prompt) if prompt and text.startswith(prompt) else None

    def _contents(self, text: str) -> dict[int, Place]:
        """Where the texts of the assistant's messages are; none if the template changes them."""
        own = [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == ASSISTANT and message["content"].strip()
        ]
        marks = {number: f"thinpipe{number}marks" for number in own}
        if any(mark in text for mark in marks.values()):
            return {}
        replaced = [
            {**message, "content": marks[number]} if number in marks else message
            for number, message in enumerate(self.messages)
        ]
        try:
            rest = self.text(replaced)
        except TemplateError:
            return {}
        found, at = dict[int, Place](), 0
        for number in own:
            before, mark, rest = rest.partition(marks[number])
            if not mark or not text.startswith(before, at):
                return {}
            at += len(before)
            next_mark = next((marks[other] for other in own if other > number), None)
            between = rest if next_mark is None else rest.partition(next_mark)[0]
            written = _written(text, at, self.messages[number]["content"], between)
            if written is None:
                return {}
            found[number] = (at, at + len(written))
            at += len(written)
        return found if text[at:] == rest else {}


def _written(text: str, at: int, content: str, after: str) -> str | None:
    """How a template wrote a content, of which it may strip blanks."""
    ways = (content, content.strip(), content.lstrip(), content.rstrip(), content.strip("\n"))
    return next((way for way in ways if text.startswith(way + after, at)), None)
