"""Training and evaluation samples: running text, labelled texts, or prompts with responses.

`docs/data.md` describes the formats.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from thinpipe.launch.data import text
from thinpipe.launch.data.classification import labelled_set
from thinpipe.launch.data.columns import Field as RowField
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.hub import read_dataset
from thinpipe.launch.data.instructions import Layout, encode_examples, instruction_set, mix
from thinpipe.launch.data.own import load_own
from thinpipe.launch.data.rows import Format, Row, find_format, read_rows
from thinpipe.launch.data.sample_set import ColumnSet, SampleSet, SequenceSet, spread
from thinpipe.launch.data.tokenizer import Bytes, Tokenizer, load_tokenizer


def files(config: DataConfig) -> list[Path]:
    """The files that samples are read from: texts and tokenizer.

    Raises:
        ValueError: a path is missing or matches nothing.
    """
    if config.dataset is not None or config.factory is not None:
        found = []
    elif config.sources:
        found = [
            file
            for source in config.sources
            for file in text.find_files(source.path, "data.sources")
        ]
    else:
        found = text.find_files(config.path, "data.path")
    if config.eval_path is not None:
        found += text.find_files(config.eval_path, "data.eval_path")
    if config.tokenizer != "bytes":
        found += text.find_files(config.tokenizer, "data.tokenizer")
    return found


def load(
    config: DataConfig, *, seed: int = 0, vocab: int | None = None, classes: int = 2
) -> tuple[SampleSet, SampleSet]:
    """Return the training and the evaluation samples, from texts that do not overlap.

    `seed` decides mixtures and packing; `vocab` and `classes` are those of the model.

    Raises:
        ValueError: the path is missing, matches nothing or is empty; a row does not fit the
            settings; too few samples; the tokenizer has more tokens than the model.
        ImportError: an optional package is needed and not installed.
    """
    if config.factory is not None:
        count = 0 if config.eval_sequences == "all" else config.eval_sequences
        return load_own(config.factory, config.eval_factory, count)
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab is not None and tokenizer.vocab > vocab:
        raise ValueError(
            f"model.vocab = {vocab}: data.tokenizer = {config.tokenizer!r} has {tokenizer.vocab} "
            f"tokens; set model.vocab = {tokenizer.vocab}"
        )
    if config.kind == "text":
        training, held_out = _read_text(config)
        if not training:
            raise ValueError(f"{config.source}: the text is empty; name one with some text")
        return (
            _sequences(training, "train_sequences", config=config, tokenizer=tokenizer),
            _sequences(held_out, "eval_sequences", config=config, tokenizer=tokenizer),
        )
    rows = _read_rows(config, seed)
    sets = [_samples(part, config, tokenizer, seed=seed, classes=classes) for part in rows]
    return (
        _selected(sets[0], "train_sequences", config=config),
        _selected(sets[1], "eval_sequences", config=config),
    )


def _read_text(config: DataConfig) -> tuple[bytes, bytes]:
    held_out: Iterable[bytes] | None = None
    if config.dataset is not None:
        rows, rest = read_dataset(config.dataset, [_text_field(config)])
        # one document: the end is held out, not every tenth line
        training = [b"".join(text.take(_documents(rows, config), config.max_bytes))]
        held_out = None if rest is None else _documents(rest, config)
    else:
        training = text.take(_read_documents(config, config.path, "data.path"), config.max_bytes)
        if config.eval_path is not None:
            held_out = _read_documents(config, config.eval_path, "data.eval_path")
    if held_out is None:
        return text.split(training)
    return b"".join(training), b"".join(text.take(held_out, config.max_bytes))


def _read_documents(config: DataConfig, path: str | None, setting: str) -> Iterable[bytes]:
    """Read lazily, so that `max_bytes` also limits what is read."""
    files = text.find_files(path, setting)
    if _format(config, files, f"{setting} = {path!r}") == "text":
        return map(Path.read_bytes, files)
    return _documents(_file_rows(config, path, setting), config)


def _documents(rows: Sequence[Row], config: DataConfig) -> list[bytes]:
    return [text.line(row.text(_text_field(config), blank=True)) for row in rows]


def _text_field(config: DataConfig) -> RowField:
    return "text" if config.text_field is None else config.text_field


def _read_rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    if config.dataset is not None:
        training, held_out = read_dataset(config.dataset, config.fields)
        if held_out is None:
            training, held_out = _hold_out(training)
        return training, held_out
    found = [
        _file_rows(config, source.path, f"data.sources.{number}.path")
        for number, source in enumerate(config.sources)
    ] or [_file_rows(config, config.path, "data.path")]
    weights = [source.weight for source in config.sources] or None
    if config.eval_path is not None:
        return mix(found, weights, seed), _file_rows(config, config.eval_path, "data.eval_path")
    parts = [_hold_out(rows) for rows in found]
    held_out = [row for _, rest in parts for row in rest]
    return mix([training for training, _ in parts], weights, seed), held_out


def _hold_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every tenth row is held out."""
    last = text.HELD_OUT - 1
    kept = [row for number, row in enumerate(rows) if number % text.HELD_OUT != last]
    return kept, list(rows[last :: text.HELD_OUT])


def _file_rows(config: DataConfig, path: str | None, setting: str) -> list[Row]:
    source = f"{setting} = {path!r}"
    files = text.find_files(path, setting)
    kind = _format(config, files, source)
    assert kind != "text", "_format rejects text with fields"
    header = not any(isinstance(field, int) for field in config.fields)
    if kind == "jsonl" and not header:
        raise ValueError(
            f"{source}: fields {config.fields}: JSONL has names, not numbers; use these"
        )
    rows = read_rows(files, kind, header=header)
    if not rows:
        raise ValueError(f"{source}: no rows; name a file that has some")
    return rows


def _format(config: DataConfig, files: Sequence[Path], source: str) -> Format:
    kind: Format
    if config.format != "auto":
        kind = config.format
    else:
        kind = find_format(files, source=source, has_fields=bool(config.fields))
    if kind != "text" and not config.fields:
        raise ValueError(
            f"{source}: {kind} has fields; name them in data.text_field or in data.prompt_field "
            'and data.response_field, or set data.format = "text"'
        )
    if kind == "text" and config.fields:
        raise ValueError(
            f'{source}: text has no fields {config.fields}; set data.format = "tsv" or "jsonl"'
        )
    return kind


def _samples(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, *, seed: int, classes: int
) -> ColumnSet:
    length = config.sequence_length
    if not rows:
        raise ValueError(
            f"{config.source}: fewer than {text.HELD_OUT} rows, so none is held out; "
            "set data.eval_path or use more rows"
        )
    if config.prompt_field is not None and config.response_field is not None:
        examples = encode_examples(
            rows, config.prompt_field, config.response_field, tokenizer=tokenizer
        )
        prefix = config.objective == "prefix"
        return instruction_set(examples, Layout(length, config.packs, prefix, seed))
    return labelled_set(rows, config, tokenizer, length=length, classes=classes)


def _selected(samples: ColumnSet, setting: str, *, config: DataConfig) -> ColumnSet:
    chosen = spread(
        len(samples),
        getattr(config, setting),
        setting=setting,
        found=f"{config.source} gives {len(samples)} for it",
        remedy='"all", or more data',
    )
    return samples if chosen is None else samples.select(chosen)


def _sequences(
    running: bytes, setting: str, *, config: DataConfig, tokenizer: Tokenizer
) -> SequenceSet:
    length = config.sequence_length
    tokens = tokenizer.stream(running)
    available = (len(tokens) - 1) // length
    found = f"the text of {config.source} leaves {len(tokens)} {tokenizer.unit} for {setting}"
    if available < 1:
        raise ValueError(
            f"data.sequence_length = {length}: {found} and one sequence takes {length + 1}; "
            f"use a longer text or shorter sequences"
            + (f", or raise data.max_bytes = {config.max_bytes}" if config.max_bytes else "")
        )
    windows = tokens.unfold(0, length + 1, length)
    sequences = f"{available} sequence{'' if available == 1 else 's'}"
    chosen = spread(
        available,
        getattr(config, setting),
        setting=setting,
        found=f"{found}, enough for {sequences} of {length}",
        remedy="a longer text or shorter sequences",
    )
    notes = []
    if isinstance(tokenizer, Bytes) and not text.is_utf8(running):
        held_out = setting == "eval_sequences" and config.eval_path is not None
        source = f"data.eval_path = {config.eval_path!r}" if held_out else config.source
        notes.append(f"note: {source} is not UTF-8 text; it is read as plain bytes")
    return SequenceSet(windows if chosen is None else windows[chosen], notes)
