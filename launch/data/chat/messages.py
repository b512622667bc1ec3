"""The messages of a row, in the form that chat templates take.

OpenAI's `role` and `content`, or ShareGPT's `from` and `value` with its names of roles.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.rows import Row, RowError, is_utf8, without_nulls

Message = Mapping[str, Any]
ASSISTANT = "assistant"

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "bot", "model", ASSISTANT), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
    "function_call": "function_call",
}
"""What data sets in ShareGPT's form call the roles."""


def messages_of(row: Row, field: Field, *, answered: bool = True) -> list[Message]:
    """The conversation of a row; a field `system` next to it comes first, as a system message.

    It holds an answer if it has to be `answered`.

    Raises:
        RowError: it is none.
    """
    found = row.value(field)
    if isinstance(found, str):
        found = _parsed(field, found)
    if not isinstance(found, Sequence) or not found:
        raise RowError(f"field {field!r} is no list of messages")
    messages = [_message(one) for one in found]
    system = row.fields.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if answered and not any(message["role"] == ASSISTANT for message in messages):
        raise RowError("no message is the assistant's")
    return messages


def question_and_answer(row: Row, prompt: Field, response: Field) -> list[Message]:
    """A prompt and its completion, each a list of messages; the prompt's answers are not learnt."""
    asked = [
        {**message, "weight": 0} if message["role"] == ASSISTANT else message
        for message in messages_of(row, prompt, answered=False)
    ]
    return [*asked, *messages_of(row, response)]


def tools_of(row: Row) -> list[Any] | None:
    """What a field `tools` says that the assistant may call, as a list or as JSON.

    Raises:
        RowError: it is neither.
    """
    found = row.fields.get("tools")
    if isinstance(found, str):
        found = _parsed("tools", found) if found.strip() else None
    if not found:
        return None
    if not isinstance(found, Sequence):
        raise RowError("field 'tools' is no list")
    return [without_nulls(tool) for tool in found]


def _message(found: Any) -> Message:
    if not isinstance(found, Mapping):
        raise RowError("a message is no object")
    given = without_nulls(found)
    if "role" not in given and "from" in given:
        names = "from", "value"
        role = _ROLES.get(str(given["from"]).lower())
    else:
        names = "role", "content"
        role = given.get("role")
    content = given.get(names[1])
    rest = {key: given[key] for key in given if key not in names}
    if not isinstance(role, str) or not role:
        raise RowError(f"a message's role is {given.get('role', given.get('from'))!r}")
    if role == "function_call":
        role, content, rest = ASSISTANT, "", rest | {"tool_calls": [_call(content)]}
    if "tool_calls" in rest:
        rest["tool_calls"] = [_with_arguments(call) for call in rest["tool_calls"]]
    text = _text(content, blank=role != ASSISTANT or "tool_calls" in rest)
    if rest.get("weight", 1) not in (0, 1):
        raise RowError("a message's weight is neither 0 nor 1")
    return {"role": role, "content": text, **rest}


def _text(content: Any, *, blank: bool) -> str:
    """A message's text, of one string or of parts that are all texts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = (part.get("type") if isinstance(part, Mapping) else None for part in content)
        for other in (kind for kind in kinds if kind != "text"):
            raise RowError(f"a message has a part of type {other!r}")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and blank:
        return ""
    if not isinstance(content, str):
        raise RowError(f"a message is {type(content).__name__}, not text")
    if not is_utf8(content):
        raise RowError("a message holds an unpaired surrogate")
    if not blank and not content.strip():
        raise RowError("a message of the assistant is blank")
    return content


def _call(content: Any) -> Mapping[str, Any]:
    """A call of a tool, as ShareGPT's data sets write it: JSON with `name` and `arguments`."""
    try:
        found = json.loads(content)
        function = {"name": found["name"], "arguments": found["arguments"]}
    except (TypeError, ValueError, KeyError):
        raise RowError("a function_call is no JSON of name and arguments") from None
    return {"type": "function", "function": function}


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object: OpenAI's are JSON text, and templates want objects."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, ValueError, KeyError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(field: Field, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise RowError(f"field {field!r} is text, not a list") from None
