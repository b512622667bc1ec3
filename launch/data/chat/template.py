"""Chat templates, as transformers renders them.

A template is Jinja text that writes a list of messages out. Its `{% generation %}` marks, where it
has some, say what the assistant wrote.
"""

import re
from collections.abc import Sequence
from datetime import date
from typing import Any

from thinpipe.launch.data.chat.messages import ASSISTANT, Message
from thinpipe.launch.data.tokenizer import FolderTokenizer, Tokenizer
from thinpipe.launch.host.packages import explain, first_line
from thinpipe.pipeline.models.paths import user_path

OWN, PLAIN = "tokenizer", "plain"
_PLAIN_SOURCE = (
    "{% for message in messages %}{{ '### ' + message.role | capitalize + ':\n' }}"
    "{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_ALWAYS = date(2024, 7, 26)
"""What templates take for today, as Llama 3.1's does without a clock: tokens must not change."""


class TemplateError(ValueError):
    """A template writes these messages not at all; the message is its own."""


class ChatTemplate:
    """Writes messages out. `marks_answers` says whether it tells which text is the assistant's."""

    def __init__(self, source: str, renderer: Any) -> None:
        """`renderer` is a tokenizer of transformers, whose special tokens templates use."""
        self._source = _TODAY.sub(lambda found: repr(_ALWAYS.strftime(found[2])), source)
        self._renderer = renderer
        self.marks_answers = _MARKS.search(source) is not None

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> str:
        """The text of messages, with `prompt` up to where the assistant's next one begins.

        Raises:
            TemplateError: the template does not take them.
        """
        try:
            return str(
                self._renderer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self._source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except Exception as error:  # whatever the template's own code does
            raise TemplateError(first_line(error)) from error

    def marked(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """As `render`, and where the template says that the assistant wrote it."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            texts, places = render(
                [list(messages)],
                tools=tools,
                chat_template=self._source,
                return_assistant_tokens_mask=True,
                **self._renderer.special_tokens_map,
            )
        except Exception as error:
            raise TemplateError(first_line(error)) from error
        return str(texts[0]), list(places[0])

    def answer_end(self, tokenizer: Tokenizer) -> int | None:
        """The special token that it writes after an answer, if any."""
        answer = {"role": ASSISTANT, "content": "thinpipe"}
        try:
            text = self.render([{"role": "user", "content": "a"}, answer])
        except TemplateError:
            return None
        stop = text.rfind(answer["content"]) + len(answer["content"])
        ids, places = tokenizer.spans(text)
        for token, (first, _) in zip(ids, places, strict=True):
            if first >= stop and token in tokenizer.marks:
                return token if not text[stop:first].strip() else None
        return None


def load_template(name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a `data.chat_template`: the tokenizer's own, "plain", or a file's.

    Raises:
        ValueError: the tokenizer has none, or the file cannot be read.
        ImportError: an optional package is not installed.
    """
    name = name or OWN
    renderer = _renderer(name, tokenizer)
    if name == PLAIN:
        return ChatTemplate(_PLAIN_SOURCE, renderer)
    if name != OWN:
        return ChatTemplate(_read(name), renderer)
    source = renderer.chat_template
    source = source.get("default") if isinstance(source, dict) else source
    if not source:
        raise ValueError(
            f'data.chat_template = "{OWN}": the tokenizer has no chat template; name a file of '
            f'Jinja, or use "{PLAIN}"'
        )
    return ChatTemplate(source, renderer)


def _renderer(name: str, tokenizer: Tokenizer) -> Any:
    try:
        import tokenizers
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(f'data.chat_template = "{name}": {explain(error)}') from error
    plain: Any = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, FolderTokenizer):
        nothing = tokenizers.Tokenizer(tokenizers.models.BPE())
        end = tokenizer.decode([tokenizer.end], special=True)
        return plain(tokenizer_object=nothing, eos_token=end)
    # the plain class takes tokenizer.json as it is; others make what they think it should hold
    folder = tokenizer.folder
    whole = (folder / "tokenizer.json").is_file()
    kind: Any = plain if whole else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of many kinds
        raise ValueError(
            f'data.chat_template = "{name}": transformers cannot read {folder}: '
            f"{first_line(error)}; save the tokenizer again"
        ) from error


def _read(name: str) -> str:
    file = user_path(name)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f'data.chat_template = "{name}": cannot be read ({first_line(error)}); name a file of '
            f'Jinja, "{OWN}" or "{PLAIN}"'
        ) from None


def template_text(name: str | None) -> str:
    """What decides the text of a template besides the tokenizer's own files."""
    if name in (None, OWN):
        return OWN
    return _PLAIN_SOURCE if name == PLAIN else _read(str(name))
