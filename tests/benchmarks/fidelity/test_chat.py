"""What the plain side of the comparison learns is what ThinPipe learns."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.fidelity.chat import _learnt, conversation
from tests.launch.data.chat.styles import STYLES, saved
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load


def test_both_sides_learn_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = saved(STYLES["chatml"], tmp_path / "tokenizer")
    talks = [conversation(number) for number in range(20)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    training, _ = load(
        DataConfig(path=str(path), messages_field="messages", tokenizer=str(folder),
                   sequence_length=512, packing=False, train_sequences="all", eval_sequences=1)
    )  # fmt: skip
    rows = [talk for number, talk in enumerate(talks) if number % 10 != 9]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, talk in enumerate(rows):
        ids, targets = _learnt(tokenizer, talk)
        batch = training.batch([number])
        count = len(ids) - 1
        assert batch.inputs_BT[0, :count].tolist() == ids[:-1].tolist()
        assert batch.targets[0, :count].tolist() == targets[1:].tolist()
        assert (targets != -100).sum() > 20
