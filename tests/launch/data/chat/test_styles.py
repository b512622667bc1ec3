"""Conversations have the tokens of apply_chat_template, and TRL's mask, in every public style.

TRL trains on what a template's generation marks enclose; here these are only in the reference.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.launch.data.chat.styles import STYLES, marked, saved
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document, Rejected
from thinpipe.launch.data.encode import encoder_for
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.tokenizer import Tokenizer, load_tokenizer

ASKED = ("What is the capital of France?", "And of Italy?", "12 + 7?")
ANSWERS = ("Paris.", "It is Rome,\nof course!", "19")


def talk(*, system: bool = True, turns: int = 3) -> list[dict[str, Any]]:
    found = [{"role": "system", "content": "It is so."}] if system else []
    for asked, answer in zip(ASKED[:turns], ANSWERS, strict=False):
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return found


def encoded(
    folder: Path | str, *talks: list[dict[str, Any]], length: int = 2000, **settings: Any
) -> tuple[Tokenizer, list[Document | Rejected]]:
    tokenizer = load_tokenizer(str(folder))
    config = DataConfig(
        messages_field="messages", tokenizer=str(folder), sequence_length=length, **settings
    )
    rows = [Row(f"rows:{number}", {"messages": said}) for number, said in enumerate(talks)]
    return tokenizer, [*map(encoder_for(config, tokenizer).encode, rows)]


def document(folder: Path | str, said: list[dict[str, Any]], **settings: Any) -> Any:
    tokenizer, (found,) = encoded(folder, said, **settings)
    assert isinstance(found, Document), found
    return tokenizer, found


def pieces(tokenizer: Tokenizer, found: Document) -> list[str]:
    """The texts of the runs of tokens that count."""
    assert found.counts is not None
    runs: list[list[int]] = []
    for place, (token, counts) in enumerate(zip(found.tokens, found.counts, strict=True)):
        if counts and (place == 0 or not found.counts[place - 1]):
            runs.append([])
        if counts:
            runs[-1].append(int(token))
    return [tokenizer.decode(run, special=True) for run in runs]


@pytest.mark.parametrize("name", STYLES)
def test_tokens_are_those_of_apply_chat_template_and_the_mask_is_trls(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    style = STYLES[name]
    folder = saved(style, tmp_path / "a")
    own_marks = saved(style, tmp_path / "b", template=marked(style.template))
    reference = AutoTokenizer.from_pretrained(str(folder))
    bos = [] if not style.adds_bos else [reference.bos_token_id]
    for turns in (1, 3):
        said = talk(system=style.system, turns=turns)
        tokenizer, found = document(folder, said)
        expected = reference.apply_chat_template(
            said,
            chat_template=marked(style.template),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        assert ids == reference.apply_chat_template(said)["input_ids"]
        missing = [] if ids[: len(bos)] == bos else bos
        assert found.tokens.tolist() == missing + ids
        assert found.counts is not None
        assert found.counts.tolist() == [False] * len(missing) + [bool(one) for one in mask]
        assert list(found.tokens[: len(bos) + 1]).count(*(bos or [-1])) == len(bos)
        _, told = document(own_marks, said)
        assert told.tokens.tolist() == found.tokens.tolist()
        assert told.counts.tolist() == found.counts.tolist()
        for piece, answer in zip(pieces(tokenizer, found), ANSWERS[:turns], strict=True):
            said_there = piece.split("</think>\n\n")[-1]
            assert said_there.strip() == style.learnt.format(answer).strip()
