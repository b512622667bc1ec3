"""Documents of running text: their marks, and packing in which they do not see each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from tests.huggingface import section
from tests.launch.data.chat.styles import STYLES, saved
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.tokenizer import load_tokenizer
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.stage import build_stage

TEXTS = [f"{n} + 7 is not {n}. It is so, of course!" + " And so on." * (n % 4) for n in range(40)]


def _rows(folder: Path, texts: list[str] = TEXTS) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'t': text})}\n" for text in texts))
    return str(path)


def _load(folder: Path, path: str, style: str | None = "zephyr", **settings: Any) -> Any:
    tokenizer = "bytes" if style is None else str(saved(STYLES[style], folder / "tokenizer"))
    sizes = {"sequence_length": 64, "train_sequences": "all", "eval_sequences": "all"}
    config = DataConfig.model_validate(
        {"path": path, "eval_path": path, "tokenizer": tokenizer} | sizes | settings
    )
    return load_tokenizer(tokenizer), load(config)[0]


def _text(tokenizer: Any, samples: Any) -> str:
    batch = samples.batch(range(len(samples)))
    return str(tokenizer.decode(batch.inputs_BT.flatten().tolist(), special=True))


@pytest.mark.parametrize("files", [False, True])
def test_documents_have_bos_and_end_marks_as_the_tokenizer_has_them(
    tmp_path: Path, files: bool
) -> None:
    if files:
        (tmp_path / "texts").mkdir()
        for number, text in enumerate(TEXTS):
            (tmp_path / f"texts/{number:02}.txt").write_text(text)
        path, field = str(tmp_path / "texts"), {}
    else:
        path, field = _rows(tmp_path), {"text_field": "t"}
    tokenizer, found = _load(tmp_path, path, **field)
    text = _text(tokenizer, found).replace("<s> ", "<s>")
    assert text.startswith(f"<s>{TEXTS[0]}</s><s>{TEXTS[1]}</s>")
    assert found.notes == ("note: '</s>' and '<s>' between documents",)
    tokenizer, ends = _load(tmp_path, path, document_marks="end", **field)
    text = _text(tokenizer, ends).replace("</s> ", "</s>")  # each begins as a text of its own
    assert text.startswith(f"{TEXTS[0]}</s>{TEXTS[1]}</s>")
    tokenizer, none = _load(tmp_path, path, document_marks="none", **field)
    assert "</s>" not in _text(tokenizer, none)
    assert none.notes == ("note: documents follow each other without marks",)


def test_marks_that_a_text_brings_are_there_once(tmp_path: Path) -> None:
    path = _rows(tmp_path, [f"<s>{text}</s>" for text in TEXTS])
    tokenizer, found = _load(tmp_path, path, text_field="t")
    text = _text(tokenizer, found)
    assert "</s></s>" not in text
    assert text.count("<s>") <= len(TEXTS)


def test_bytes_have_marks_if_asked(tmp_path: Path) -> None:
    path = _rows(tmp_path)
    tokenizer, found = _load(tmp_path, path, None, text_field="t")
    assert _text(tokenizer, found).startswith(f"{TEXTS[0]}\n{TEXTS[1]}\n")
    tokenizer, found = _load(tmp_path, path, None, text_field="t", document_marks="end")
    assert _text(tokenizer, found).startswith(f"{TEXTS[0]}\0{TEXTS[1]}\0")


def test_packed_documents_are_whole_and_apart(tmp_path: Path) -> None:
    path = _rows(tmp_path, [*TEXTS, "long " * 100])
    tokenizer, found = _load(tmp_path, path, text_field="t", packing=True)
    batch = found.batch(range(len(found)))
    documents = set()
    for inputs, segments in zip(batch.inputs_BT, batch.segments_BT, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            documents.add(tokenizer.decode(inputs[segments == segment].tolist(), special=True))
    assert {f"<s> {text}" for text in TEXTS} <= documents
    assert "examples in" in found.notes[-1]
    counted = int((batch.targets != -100).sum())
    _, alone = _load(tmp_path, path, text_field="t", document_marks="tokenizer")
    assert abs(counted + len(TEXTS) + 1 - len(alone) * 64) <= 64


def test_text_pieces_of_one_document_have_marks_at_its_ends_alone(tmp_path: Path) -> None:
    """Longer than what is tokenized at a time."""
    (tmp_path / "long.txt").write_text("It is so, of course! " * 8000)
    tokenizer, found = _load(tmp_path, str(tmp_path / "long.txt"))
    batch = found.batch(range(len(found)))
    ids = batch.inputs_BT.flatten()
    assert int((ids == tokenizer.begin[0]).sum()) == 1
    assert int(ids[0]) == tokenizer.begin[0]
    assert int((torch.cat([ids, batch.targets[-1, -1:]]) == tokenizer.end).sum()) <= 1


@torch.no_grad()
def test_a_packed_token_has_the_loss_it_has_alone(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("llama", tmp_path / "model"))
    stage = build_stage(config, 0, config.layers, seed=0, device="cpu").eval()
    path = _rows(tmp_path, [text[:length] for length, text in enumerate(TEXTS[:20], start=4)])
    sizes = {"sequence_length": 32, "text_field": "t", "document_marks": "end"}
    packed, alone = (
        _losses(stage, _load(tmp_path, path, None, packing=True, **sizes)[1], piece)
        for piece in (False, True)
    )
    assert packed.keys() == alone.keys()
    assert max(len(key) for key in packed) > 20
    worst = max(float((packed[key] - alone[key]).abs().max()) for key in packed)
    assert worst < 1e-5


def _losses(stage: Any, samples: Any, alone: bool) -> dict[tuple[int, ...], torch.Tensor]:
    """Losses of the tokens of each document, in its sequence or without it."""
    found = {}
    for number in range(len(samples)):
        batch = samples.batch([number])
        if not alone:
            logits_T = stage(batch.inputs_BT, batch.samples)[0]
        for segment in range(1, int(batch.segments_BT.max()) + 1):
            own = batch.segments_BT[0] == segment
            inputs, targets = batch.inputs_BT[:, own], batch.targets[0, own]
            plain = Samples(batch.ids_B)
            logits = stage(inputs, plain)[0] if alone else logits_T[own]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            found[tuple(inputs[0].tolist())] = losses
    return found
