"""The samples of a run that reads its data as a stream."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from thinpipe.launch.data.classification import LabelledSet, Labelling
from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document, Listed, Rejected, document_of
from thinpipe.launch.data.encode import document_marks, encoder_for
from thinpipe.launch.data.packing import Layout, PackedSet, pack
from thinpipe.launch.data.reading.saved import HUB, stream_hub
from thinpipe.launch.data.reading.source import check_fields, source_of
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import Counted, SampleSet, WindowSet
from thinpipe.launch.data.streams.stream import Carry, Items, Make
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.launch.data.tokens.running import Marks
from thinpipe.launch.data.tokens.store import says

_log = logging.getLogger(__name__)


class _Tally:
    """Says what is left out of a stream: the first row of each reason, and each tenfold of them."""

    def __init__(self, what: str) -> None:
        self._what, self._counts = what, Counter[str]()

    def add(self, row: Rejected) -> None:
        self._counts[row.reason] += 1
        count = self._counts[row.reason]
        if says() and str(count).strip("0") == "1":
            rows = "1 row is" if count == 1 else f"{count} rows are"
            _log.warning("note: %s: %s left out: %s (%s)", self._what, rows, row.reason, row.where)


def take_held_out(items: Items, make: Make, count: int, what: str) -> SampleSet:
    """Read a stream until there are so many samples; what was read is not trained on.

    Raises:
        ValueError: it ends before.
    """
    read: list[Any] = []
    while True:
        wanted = max(64, len(read))
        found = items.take(wanted)
        read += found
        samples, _ = make(read, torch.zeros(0, dtype=torch.int32), -1)
        have = 0 if samples is None else len(samples)
        if samples is not None and have >= count:
            return Counted(samples, count, samples.notes)
        if len(found) < wanted:
            raise ValueError(
                f"data.eval_sequences = {count}: {what}, a stream, ends after {have}; use fewer, "
                "or name other data in data.eval_path"
            )


def rows_of(config: DataConfig) -> Callable[[], Iterable[Row]]:
    """What gives the rows of `data.path` from the first one.

    Raises:
        ValueError: there are none, or they lack a field.
    """
    if config.path is not None and config.path.startswith(HUB):
        check_fields(stream_hub(config.path), config.fields, f"data.path = {config.path!r}")
        return partial(stream_hub, config.path)
    source = source_of(config, config.path, "data.path")
    if source.is_text:
        raise ValueError(
            f"{source.what}: text without rows takes no memory as it is; remove data.stream_block"
        )
    return partial(source.rows, config.fields)


def make_of(config: DataConfig, tokenizer: Tokenizer, seed: int, labelling: Labelling) -> Make:
    """How rows become samples, a block at a time."""
    tally, length = _Tally(config.source), config.sequence_length
    layout = Layout(length, config.packs, config.objective == "prefix", seed)
    is_running = config.kind == "text" and not config.packs
    encode: Callable[[Row], Document | Rejected]
    if config.kind == "text":
        marks = Marks(*document_marks(tokenizer, config.document_marks))
        lines = is_running and marks == Marks()
        read = partial(_text, tokenizer, config.running_field, marks, lines=lines)
        encode = partial(document_of, read)
    else:
        encode = encoder_for(config, tokenizer, labelling).encode

    def make(
        rows: Sequence[Row], carry: Carry, number: int
    ) -> tuple[LabelledSet | PackedSet | WindowSet | None, Carry]:
        encoded = [*map(encode, rows)]
        for one in encoded:
            if isinstance(one, Rejected):
                tally.add(one)
        found = [one for one in encoded if isinstance(one, Document)]
        if is_running:
            return _windows(found, carry, length)
        documents = Listed(found)
        labelled = config.kind == "labelled"
        samples = LabelledSet(documents, length, labelling) if labelled else pack(documents, layout)
        return (samples if len(samples) else None), carry

    return make


def _text(tokenizer: Tokenizer, field: Field, marks: Marks, row: Row, *, lines: bool) -> Document:
    """A document of text; with `lines` it is a line."""
    text = row.text(field, blank=lines)
    if lines and not text.endswith("\n"):
        text += "\n"
    ids = np.array(tokenizer.encode(text), dtype=np.int32)
    return Document(marks.put(ids, first=True, last=True))


def _windows(
    documents: Sequence[Document], carry: Carry, length: int
) -> tuple[WindowSet | None, Carry]:
    """Windows over the documents, one after the other; the rest begins the next block."""
    tokens = torch.cat([carry, *(torch.from_numpy(document.tokens) for document in documents)])
    count = (len(tokens) - 1) // length if len(tokens) else 0
    left = tokens[count * length :].clone()
    if not count:
        return None, left
    windows = [Document(window.numpy()) for window in tokens.unfold(0, length + 1, length)]
    return WindowSet(Listed(windows)), left
