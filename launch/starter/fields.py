"""What `thinpipe init` makes of the fields of rows."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.chat.template import OWN, PLAIN
from thinpipe.launch.data.rows import Row

_TEXT = ("text", "content", "document")
_CHAT = ("messages", "conversations", "conversation")
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
)
_SEPARATED = "prompt"
"""By custom it ends in a separator; other questions need a template that sets off the answer."""


def find_fields(row: Row, data: str, *, has_template: bool) -> dict[str, Any]:
    """Settings of [data] for rows like this one; `has_template` is the tokenizer's.

    Raises:
        ConfigError: none of the fields is known.
    """
    names = list(row.fields)
    template = {"chat_template": OWN if has_template else PLAIN}
    for name in _CHAT:
        if name in names and _is_chat(row.fields[name]):
            return {"messages_field": name, "loss_on": "assistant", **_checked(template)}
    for prompt, response in _PAIRS:
        if prompt not in names or response not in names:
            continue
        first = [prompt, "input"] if prompt == "instruction" and "input" in names else prompt
        found: dict[str, Any] = {"prompt_field": first, "response_field": response}
        if has_template or prompt != _SEPARATED or _is_chat(row.fields[prompt]):
            found |= _checked(template)
        return found
    for name in _TEXT:
        if name in names:
            return {"text_field": name}
    known = ", ".join((*_TEXT, *_CHAT))
    raise ConfigError(
        f"--data = {data!r}: it has the fields {', '.join(map(str, names))}, none of which is "
        f"known as text or messages ({known}) or as prompt and response; rename them, or begin "
        "with a run file of examples/ and name them in [data]"
    )


def _is_chat(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    first = value[0]
    return isinstance(first, Mapping) and ({"role", "content"} <= first.keys() or "from" in first)


def _checked(template: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:  # which renders templates
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    return template
