"""Conversations of every form, what is learnt of them, and what is rejected with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.launch.data.chat.styles import STYLES, Style, plain, saved
from tests.launch.data.chat.test_styles import ANSWERS, document, encoded, pieces, talk
from thinpipe.launch.data.chat.encoder import CUT_PROMPT, CUT_TURNS, NO_TOOLS
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document, Rejected
from thinpipe.launch.data.encode import encoder_for
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.tokenizer import load_tokenizer

CHATML = STYLES["chatml"]
NO_MARKS = Style(
    "{% for m in messages %}{% if m.role == 'user' %}{{ '### Question:\n' + m.content + '\n\n' }}"
    "{% else %}{{ '### Answer:\n' + m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Answer:\n' }}{% endif %}",
    ("<eos>",),
    "<eos>",
)
GLM = Style(  # what follows an answer ends it
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
    "<|endoftext|>",
    ends=("<|endoftext|>", "<|user|>"),
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(CHATML, tmp_path_factory.mktemp("chatml"))


def rejected(folder: Path | str, said: Any, **settings: Any) -> str:
    _, (found,) = encoded(folder, said, **settings)
    assert isinstance(found, Rejected), found
    assert found.where == "rows:0"
    return found.reason


def row_of(folder: Path | str, fields: dict[str, Any], **settings: Any) -> Any:
    tokenizer = load_tokenizer(str(folder))
    config = DataConfig(tokenizer=str(folder), **{"sequence_length": 500, **settings})
    return tokenizer, encoder_for(config, tokenizer).encode(Row("row", fields))


def test_sharegpt_is_the_same_conversation(chatml: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    said = talk()
    same = [{"from": names[m["role"]], "value": m["content"]} for m in said]
    assert document(chatml, same)[1].tokens.tolist() == document(chatml, said)[1].tokens.tolist()
    for fields in ({"messages": same[1:], "system": "It is so."}, {"messages": json.dumps(said)}):
        _, found = row_of(chatml, fields, messages_field="messages")
        assert found.tokens.tolist() == document(chatml, said)[1].tokens.tolist()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no list", "field 'messages' is text, not a list"),
        ([], "field 'messages' is no list of messages"),
        (None, "field 'messages' is null"),
        (["hi"], "a message is no object"),
        ([{"role": None, "content": "a"}], "a message's role is None"),
        ([{"from": "robot", "value": "a"}], "a message's role is 'robot'"),
        ([{"role": "user", "content": "a"}], "no message is the assistant's"),
        ([{"role": "assistant", "content": " "}], "a message of the assistant is blank"),
        ([{"role": "assistant", "content": 3}], "a message is int, not text"),
        ([{"role": "assistant", "content": "\ud800"}], "a message holds an unpaired surrogate"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message has a part of type 'imag"),
        ([{"from": "function_call", "value": "{}"}], "a function_call is no JSON of name and args"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}],
            "an answer holds an end mark before its end",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}],
            "no answer is learnt, as their weights are 0",
        ),
    ],
)
def test_what_is_no_conversation_is_rejected(chatml: Path, said: Any, reason: str) -> None:
    assert rejected(chatml, said).startswith(reason.partition(" and args")[0])


REVERSED = "{% for m in messages | reverse %}{{ m.content | upper }}{{ eos_token }}{% endfor %}"
GLUED = (
    "{% for m in messages %}{{ 'Par' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "is."}]


@pytest.mark.parametrize(
    ("style", "template", "said", "reason"),
    [
        ("gemma", None, talk(), "the chat template rejects it (System role not supported)"),
        ("chatml", REVERSED, talk(), "it cannot be told where the template begins an answer"),
        ("chatml", GLUED, ASKED, "a token holds the end of a prompt and the beginning of its ans"),
    ],
)
def test_what_a_template_cannot_write_is_rejected(
    tmp_path: Path, style: str, template: str | None, said: Any, reason: str
) -> None:
    folder = saved(STYLES[style], tmp_path, template=template)
    assert rejected(folder, said).startswith(reason)


def test_loss_on_the_last_answer_or_on_everything(chatml: Path) -> None:
    tokenizer, found = document(chatml, talk(), loss_on="last")
    assert pieces(tokenizer, found) == [f"{ANSWERS[-1]}<|im_end|>"]
    _, whole = document(chatml, talk(), loss_on="all")
    assert whole.counts is None
    assert whole.tokens.tolist() == found.tokens.tolist()


def test_answers_of_weight_0_are_not_learnt(chatml: Path) -> None:
    said = talk()
    said[2] = {**said[2], "weight": 0}
    tokenizer, found = document(chatml, said)
    assert pieces(tokenizer, found) == [f"{answer}<|im_end|>" for answer in ANSWERS[1:]]


def test_an_answer_that_brings_its_end_mark_has_it_once(chatml: Path) -> None:
    said = talk()
    said[-1] = {**said[-1], "content": f"{said[-1]['content']}<|im_end|>"}
    assert document(chatml, said)[1].tokens.tolist() == document(chatml, talk())[1].tokens.tolist()


def test_calls_of_tools_are_learnt_and_their_results_are_not(tmp_path: Path) -> None:
    folder = saved(STYLES["qwen2.5"], tmp_path)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 7}'}}
    said = [
        {"role": "user", "content": "12 + 7?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "content": "It is 19.", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"x": None, "y": 1}}}]
    for given in (tools, json.dumps(tools)):
        fields = {"messages": said, "tools": given}
        tokenizer, found = row_of(folder, fields, messages_field="messages")
        assert isinstance(found, Document), found
        arguments = '{"name": "add", "arguments": {"a": 12, "b": 7}}'
        first, second = pieces(tokenizer, found)
        assert first == f"\n<tool_call>{arguments}</tool_call><|im_end|>"
        assert second == "It is 19.<|im_end|>"
        assert "Tools: [" in tokenizer.decode(found.tokens.tolist(), special=True)
    function_call = {"from": "function_call", "value": arguments}
    same = [{"from": "human", "value": "12 + 7?"}, function_call, *said[2:]]
    assert row_of(folder, {"messages": same}, messages_field="messages")[1].counts.any()


def test_what_a_template_leaves_out_of_tools_is_said(chatml: Path) -> None:
    """It would be taught to answer with nothing, or of tools that it was not told of."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 7}}}
    calls = [*talk()[:2], {"role": "assistant", "content": "", "tool_calls": [call]}]
    reason = "the chat template writes nothing of a call of tools"
    assert rejected(chatml, calls) == reason
    assert rejected(chatml, [*talk()[:2], {**calls[2], "content": "I add."}]) == reason
    fields = {"messages": talk(), "tools": [{"type": "function", "function": {"name": "add"}}]}
    _, found = row_of(chatml, fields, messages_field="messages")
    assert found.remark == NO_TOOLS
    assert found.tokens.tolist() == document(chatml, talk())[1].tokens.tolist()


def test_templates_without_end_marks_get_the_tokenizers(tmp_path: Path) -> None:
    tokenizer, found = document(saved(NO_MARKS, tmp_path), talk(system=False))
    assert pieces(tokenizer, found) == [f"{answer}<eos>" for answer in ANSWERS]
    text = tokenizer.decode(found.tokens.tolist(), special=True)
    assert text.count("<eos>") == 3
    assert text.endswith("### Answer:\n19<eos>\n\n")


def test_what_begins_the_next_question_may_end_an_answer(tmp_path: Path) -> None:
    tokenizer, found = document(saved(GLM, tmp_path), talk())
    *first, last = pieces(tokenizer, found)
    assert first == [f"{answer}<|user|>" for answer in ANSWERS[:-1]]
    assert last == f"{ANSWERS[-1]}<|endoftext|>"


def test_bytes_talk_in_a_plain_template() -> None:
    tokenizer, found = document("bytes", talk(turns=2), chat_template="plain")
    assert pieces(tokenizer, found) == [f"{answer}\0" for answer in ANSWERS[:2]]
    assert rejected("bytes", [], chat_template="plain")
    with pytest.raises(ValueError, match=r'"tokenizer": the tokenizer has no chat template; name'):
        encoded("bytes", talk())
    with pytest.raises(ValueError, match=r'"gone.jinja": cannot be read .*; name a file of Jinja'):
        encoded("bytes", talk(), chat_template="gone.jinja")


def test_a_template_that_writes_the_day_writes_the_same_every_day(tmp_path: Path) -> None:
    dated = "{% set day = strftime_now('%d %b %Y') %}{{ '<|im_start|>' + day }}"
    folder = saved(CHATML, tmp_path, template=dated + plain(CHATML.template))
    tokenizer, found = document(folder, talk())
    text = tokenizer.decode(found.tokens.tolist(), special=True)
    assert text.startswith("<|im_start|>26 Jul 2024<|im_start|>system")


def test_long_conversations_lose_their_first_turns_and_say_so(chatml: Path) -> None:
    whole = document(chatml, talk())[1]
    tokenizer, found = document(chatml, talk(), length=len(whole) - 5)
    assert found.remark == CUT_TURNS
    assert pieces(tokenizer, found) == [f"{answer}<|im_end|>" for answer in ANSWERS[1:]]
    assert tokenizer.decode(found.tokens.tolist()).startswith("system\nIt is so.\nuser\nAnd of")


def test_prompts_are_cut_from_the_left_and_answers_never(chatml: Path) -> None:
    said = talk(system=False, turns=1)
    whole = document(chatml, said)[1].tokens.tolist()
    learnt = document(chatml, said)[1].counts.sum()
    tokenizer, found = document(chatml, said, length=len(whole) - 4)
    assert found.remark == CUT_PROMPT
    assert found.tokens.tolist() == whole[-len(found.tokens) - 1 : -1]
    assert found.counts.sum() == learnt
    assert pieces(tokenizer, found) == ["Paris.<|im_end|>"]
    assert rejected(chatml, said, length=2) == "its answer is longer than data.sequence_length"


PAIR = {"prompt_field": "q", "response_field": "a"}


def test_prompts_without_a_template_are_plain_text_with_bos_and_end_once(tmp_path: Path) -> None:
    folder = saved(STYLES["zephyr"], tmp_path)
    for prompt, response in (("a0:", "b"), ("<s>a0:", "b</s>"), ("a0:", "b</s>")):
        tokenizer, found = row_of(folder, {"q": prompt, "a": response}, **PAIR)
        text = tokenizer.decode(found.tokens.tolist(), special=True)
        assert text.replace("<s> ", "<s>") == "<s>a0:b</s>"
        assert pieces(tokenizer, found) == ["b</s>"]
    long = {"q": "It is so. " * 20, "a": "19"}
    tokenizer, found = row_of(folder, long, **PAIR, sequence_length=6)
    assert (len(found), found.remark) == (7, CUT_PROMPT)
    assert found.tokens[0] == tokenizer.begin[0]
    assert pieces(tokenizer, found) == ["19</s>"]


def test_alpaca_is_a_question_with_its_input(chatml: Path) -> None:
    alpaca = {"prompt_field": ("instruction", "input"), "response_field": "output"}
    fields = {"instruction": "Add.", "input": "12 + 7", "output": "19"}
    tokenizer, found = row_of(chatml, fields, chat_template="tokenizer", **alpaca)
    asked = [{"role": "user", "content": "Add.\n\n12 + 7"}, {"role": "assistant", "content": "19"}]
    assert found.tokens.tolist() == document(chatml, asked)[1].tokens.tolist()
    for empty in ("", None, "  "):
        _, found = row_of(chatml, {**fields, "input": empty}, chat_template="plain", **alpaca)
        assert "### User:\nAdd.\n\n### Assistant:" in tokenizer.decode(found.tokens.tolist())


def test_a_prompt_and_its_completion_may_be_messages(chatml: Path) -> None:
    """As TRL has them: what the prompt holds of answers is not learnt."""
    said = talk()
    fields = {"q": said[:-1], "a": said[-1:]}
    tokenizer, found = row_of(chatml, fields, chat_template="tokenizer", **PAIR)
    assert found.tokens.tolist() == document(chatml, said)[1].tokens.tolist()
    assert pieces(tokenizer, found) == [f"{ANSWERS[-1]}<|im_end|>"]
    _, found = row_of(chatml, fields, **PAIR)
    assert found.reason == "field 'q' is list, not text"


def test_the_key_is_of_everything_that_decides_the_tokens(tmp_path: Path) -> None:
    folder = saved(CHATML, tmp_path / "t")
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")

    def key(**settings: Any) -> str:
        fields = {"messages_field": "m", "tokenizer": str(folder)}
        config = DataConfig.model_validate(fields | settings)
        return encoder_for(config, load_tokenizer(str(folder))).key

    own = {"chat_template": str(template)}
    keys = [key(), key(loss_on="last"), key(sequence_length=9), key(messages_field="n"), key(**own)]
    assert key(packing=False) == keys[0]
    template.write_text("{{ messages }} ")
    keys.append(key(**own))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    keys.append(key())
    assert len(set(keys)) == len(keys)
