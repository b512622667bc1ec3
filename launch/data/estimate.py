"""How many samples large data will give, by a look at how they begin: for runs that are counted."""

from itertools import islice

import torch

from thinpipe.launch.data.classification import Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.reading.opening import blocks
from thinpipe.launch.data.reading.records import FileRows, parquet_count
from thinpipe.launch.data.reading.saved import HUB, is_saved
from thinpipe.launch.data.reading.source import Source, source_of
from thinpipe.launch.data.reading.text import HELD_OUT, Decoder
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import Counted, SampleSet
from thinpipe.launch.data.streams.blocks import make_of
from thinpipe.launch.data.tokenizer import load_tokenizer
from thinpipe.launch.host.words import format_bytes, format_count
from thinpipe.pipeline.models.paths import user_path

_LARGE_NBYTES = 64 << 20  # less than this is read as in a run, within a minute
_HEAD_NBYTES, _HEAD_ROWS = 1 << 20, 100_000  # whichever is read first: rows may be tiny
_PACKED = 4  # how many times as long text is when it is unpacked, roughly


def estimate(
    config: DataConfig, *, seed: int, labelling: Labelling
) -> tuple[SampleSet, SampleSet] | None:
    """Samples to train and to evaluate on; None if the data are small, or not files."""
    named = [path for path in config.paths.values() if path is not None]
    datasets = any(path.startswith(HUB) or is_saved(user_path(path)) for path in named)
    if config.factory is not None or config.stream_block is not None or datasets or not named:
        return None
    sources = [source_of(config, path, setting) for setting, path in config.paths.items()]
    if sum(source.nbytes for source in sources) < _LARGE_NBYTES:
        return None
    make = make_of(config, load_tokenizer(config.tokenizer), seed, labelling)
    counts, notes, head = list[float](), list[str](), None
    for source in sources:
        rows, share, what = _beginning(source, config)
        samples, _ = make(rows, torch.zeros(0, dtype=torch.int32), 0)
        if samples is None:
            raise ValueError(f"{source.what}: its beginning gives no sample; look at its rows")
        head = head or samples
        counts.append(len(samples) / share)
        notes.append(
            f"note: {source.what}: {format_bytes(source.nbytes)}, {what}: about "
            f"{format_count(counts[-1])} samples, estimated from the beginning; a run "
            "reads and counts them all first"
        )
    assert head is not None, "there is a source"
    weights = [source.weight for source in config.sources] or [1.0]
    # as `mix` takes them: until the source that is the shortest for its weight is used up
    total = sum(weights) * min(n / weight for n, weight in zip(counts, weights, strict=True))
    kept = 1.0 if config.eval_path is not None else 1 - 1 / HELD_OUT
    wanted = config.train_sequences
    count = int(total * kept) if wanted == "all" else min(wanted, int(total * kept))
    held_out = 1 if config.eval_sequences == "all" else config.eval_sequences
    return Counted(head, max(1, count), tuple(notes)), Counted(head, held_out)


def _beginning(source: Source, config: DataConfig) -> tuple[list[Row], float, str]:
    """Rows of the beginning, their share of the whole, and what the whole is, in words."""
    form = source.forms[0]
    longer = _PACKED if form.compression else 1
    if source.is_text:
        text = Decoder().decode(next(blocks(form.path, form.compression), b""))
        unpacked = source.nbytes * longer
        nbytes = min(unpacked, config.max_bytes or unpacked)
        row = Row(str(form.path), {config.running_field: text})
        files = f"{len(source.forms)} file{'' if len(source.forms) == 1 else 's'}"
        return [row], min(1.0, len(text.encode()) / max(1, nbytes)), files
    rows, nbytes, known = list[Row](), 0, parquet_count(source.forms)
    read = source.rows(config.fields or [config.running_field])
    if known is None and form.kind in ("parquet", "arrow"):
        read = FileRows(source.forms)  # the bytes of whole rows say how many there are
    for row in islice(read, _HEAD_ROWS):
        rows.append(row)
        if form.kind in ("jsonl", "json"):  # about as many as it takes in its file
            nbytes += len(str(row.fields))
        else:
            nbytes += sum(len(str(cell)) + 1 for cell in row.fields.values())
        if nbytes >= _HEAD_NBYTES:
            break
    count = known or round(len(rows) * max(1.0, source.nbytes * longer / max(1, nbytes)))
    whole = f"{'' if known else 'about '}{format_count(count)} rows"
    return rows, min(1.0, len(rows) / max(1, count)), whole
