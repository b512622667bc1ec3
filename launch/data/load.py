"""Training and evaluation samples: running text, labelled texts, or prompts with responses.

`docs/data.md` describes the formats.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from thinpipe.launch.data.chat.template import OWN, PLAIN
from thinpipe.launch.data.classification import labelled_set
from thinpipe.launch.data.columns import Field as RowField
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Chosen, Documents, Joined
from thinpipe.launch.data.encode import describe_marks, document_marks, encoder_for
from thinpipe.launch.data.own import OwnSet, load_own, made
from thinpipe.launch.data.packing import Layout, PackedSet, mix, pack
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.data.reading.saved import HUB
from thinpipe.launch.data.reading.source import Source, open_source
from thinpipe.launch.data.reading.text import HELD_OUT, Part
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet, SampleSet, WindowSet, spread
from thinpipe.launch.data.token_file import TokenFile, rejections
from thinpipe.launch.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from thinpipe.launch.data.tokens.encoded import encoded_rows
from thinpipe.launch.data.tokens.running import Marks, running_tokens

Selectable = TypeVar("Selectable", ColumnSet, PackedSet)


def files(config: DataConfig) -> list[Path]:
    """The files that samples are read from: texts, tokenizer and chat template.

    Raises:
        ValueError: a path is missing or matches nothing.
    """
    if config.factory is not None:
        return []
    named = {f"data.sources.{at}.path": source.path for at, source in enumerate(config.sources)}
    paths: dict[str, str | None] = dict(named) or {"data.path": config.path}
    if config.eval_path is not None:
        paths["data.eval_path"] = config.eval_path
    if config.tokenizer != BYTES:
        paths["data.tokenizer"] = config.tokenizer
    if config.chat_template not in (None, OWN, PLAIN):
        paths["data.chat_template"] = config.chat_template
    local = {name: path for name, path in paths.items() if not (path or "").startswith(HUB)}
    return [file for name, path in local.items() for file in find_files(path, name)]


def load(
    config: DataConfig,
    *,
    seed: int = 0,
    vocab: int | None = None,
    classes: int = 2,
    drawn: int = 0,
) -> tuple[SampleSet, SampleSet]:
    """Return the training and the evaluation samples, from texts that do not overlap.

    `seed` decides mixtures and packing; `vocab` and `classes` are those of the model; `drawn` is
    how many samples a run takes of a stream.

    Raises:
        ValueError: the path is missing, matches nothing or is empty; a row does not fit the
            settings; too few samples; the tokenizer has more tokens than the model.
        ImportError: an optional package is needed and not installed.
    """
    if config.stream_block is not None:
        return _load_stream(config, seed=seed, vocab=vocab, classes=classes, drawn=drawn)
    if config.factory is not None:
        count = 0 if config.eval_sequences == "all" else config.eval_sequences
        return load_own(config.factory, config.eval_factory, count)
    tokenizer = _tokenizer(config, vocab)
    if config.kind == "text":
        return _load_text(config, tokenizer, seed)
    if config.kind == "instructions":
        return _load_examples(config, tokenizer, seed)
    parts = _labelled_rows(config)
    sets = [_labelled(rows, config, tokenizer, classes=classes) for rows in parts]
    return (
        _selected(sets[0], "train_sequences", config=config),
        _selected(sets[1], "eval_sequences", config=config),
    )


def _tokenizer(config: DataConfig, vocab: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab is not None and tokenizer.vocab > vocab:
        raise ValueError(
            f"model.vocab = {vocab}: data.tokenizer = {config.tokenizer!r} has {tokenizer.vocab} "
            f"tokens; set model.vocab = {tokenizer.vocab}"
        )
    return tokenizer


def _load_stream(
    config: DataConfig, *, seed: int, vocab: int | None, classes: int, drawn: int
) -> tuple[SampleSet, SampleSet]:
    from thinpipe.launch.data.streams.blocks import load_stream  # for those who ask for it

    tokenizer = None if config.factory else _tokenizer(config, vocab)
    held_out: SampleSet | None = None
    if config.eval_path is not None:
        whole: dict[str, Any] = {"path": config.eval_path, "stream_block": None}
        whole |= {"train_sequences": config.eval_sequences}
        held_out, _ = load(config.model_copy(update=whole), seed=seed, vocab=vocab, classes=classes)
    elif config.eval_factory is not None:
        held_out = OwnSet(made(config.eval_factory, "data.eval_factory"), config.source)
    return load_stream(config, tokenizer, held_out, seed=seed, classes=classes, total=drawn)


def _load_examples(
    config: DataConfig, tokenizer: Tokenizer, seed: int
) -> tuple[PackedSet, PackedSet]:
    """Prompts or conversations: each source is encoded as a whole, then divided by its rows."""
    encoder = encoder_for(config, tokenizer)
    named = {f"data.sources.{at}.path": source.path for at, source in enumerate(config.sources)}
    paths: dict[str, str | None] = dict(named) or {"data.path": config.path}
    sources = [_source(config, path, setting) for setting, path in paths.items()]
    files = [encoded_rows(source, config.fields, encoder) for source in sources]
    rest = [source.held_out for source in sources]
    if config.eval_path is not None:
        rest = [_source(config, config.eval_path, "data.eval_path")]
    weights = [source.weight for source in config.sources] or None
    if all(rest):
        kept = [np.arange(len(file)) for file in files]
        others = [encoded_rows(source, config.fields, encoder) for source in rest if source]
        held_out: Documents = Joined(others)
    else:
        last = [file.rows % HELD_OUT == HELD_OUT - 1 for file in files]
        kept = [np.flatnonzero(~own) for own in last]
        others = []
        held_out = Joined(
            [Chosen(file, np.flatnonzero(own)) for file, own in zip(files, last, strict=True)]
        )
    chosen = mix([len(own) for own in kept], weights, seed)
    parts = zip(files, kept, chosen, strict=True)
    training = Joined([Chosen(file, own[picked]) for file, own, picked in parts])
    notes = [
        f"note: {source.what}: {note}"
        for source, file in zip([*sources, *filter(None, rest)], [*files, *others], strict=False)
        for note in rejections(file)
    ]
    return (
        _packed(training, "train_sequences", config, seed, notes),
        _packed(held_out, "eval_sequences", config, seed),
    )


def _packed(
    documents: Documents, setting: str, config: DataConfig, seed: int, notes: Sequence[str] = ()
) -> PackedSet:
    if not len(documents):
        raise ValueError(
            f"{config.source}: fewer than {HELD_OUT} rows, so none is held out; "
            "set data.eval_path or use more rows"
        )
    prefix = config.objective == "prefix"
    found = pack(documents, Layout(config.sequence_length, config.packs, prefix, seed), notes)
    return _selected(found, setting, config=config)


def _load_text(config: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[SampleSet, SampleSet]:
    source = _source(config, config.path, "data.path")
    rest = source.held_out
    if config.eval_path is not None:
        rest = _source(config, config.eval_path, "data.eval_path")
    field, limit = _text_field(config), config.max_bytes
    begin, finish = document_marks(tokenizer, config.document_marks)
    marks = Marks(begin, finish) if begin or finish or config.packs else None

    def windows(source: Source, part: Part, setting: str) -> SampleSet:
        tokens = running_tokens(source, part, field, tokenizer, limit=limit, marks=marks)
        if config.packs:
            notes = _notes(tokens, source.what, config, tokenizer)
            return _packed(tokens, setting, config, seed, notes)
        return _windows(tokens, setting, source.what, config=config, tokenizer=tokenizer)

    return (
        windows(source, "training" if rest is None else "all", "train_sequences"),
        windows(rest or source, "held out" if rest is None else "all", "eval_sequences"),
    )


def _source(config: DataConfig, path: str | None, setting: str) -> Source:
    kind = None if config.format == "auto" else config.format
    optional = config.optional_fields
    return open_source(path, setting, kind=kind, fields=config.fields, optional=optional)


def _text_field(config: DataConfig) -> RowField:
    return "text" if config.text_field is None else config.text_field


def _labelled_rows(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and every tenth, or those of a file of their own."""
    source = _source(config, config.path, "data.path")
    rows, rest = source.rows(config.fields), source.held_out
    if config.eval_path is not None:
        rest = _source(config, config.eval_path, "data.eval_path")
    if rest is not None:
        return list(rows), list(rest.rows(config.fields))
    last = HELD_OUT - 1
    kept = [row for number, row in enumerate(rows) if number % HELD_OUT != last]
    return kept, list(rows[last::HELD_OUT])


def _labelled(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, *, classes: int
) -> ColumnSet:
    if not rows:
        raise ValueError(
            f"{config.source}: fewer than {HELD_OUT} rows, so none is held out; "
            "set data.eval_path or use more rows"
        )
    return labelled_set(rows, config, tokenizer, length=config.sequence_length, classes=classes)


def _selected(samples: Selectable, setting: str, *, config: DataConfig) -> Selectable:
    chosen = spread(
        len(samples),
        getattr(config, setting),
        setting=setting,
        found=f"{config.source} gives {len(samples)} for it",
        remedy='"all", or more data',
    )
    return samples if chosen is None else samples.select(chosen)


def _windows(
    tokens: TokenFile, setting: str, what: str, *, config: DataConfig, tokenizer: Tokenizer
) -> WindowSet:
    length = config.sequence_length
    if not tokens.facts["bytes"] and tokens.rejected:
        raise ValueError(f"{what}: no row can be used: {'; '.join(rejections(tokens))}; correct it")
    if not tokens.facts["bytes"] and setting == "train_sequences":
        raise ValueError(f"{what}: the text is empty; name one with some text")
    available = (tokens.size - 1) // length
    found = f"the text of {what} leaves {tokens.size} {tokenizer.unit} for {setting}"
    if available < 1:
        raise ValueError(
            f"data.sequence_length = {length}: {found} and one sequence takes {length + 1}; "
            f"use a longer text or shorter sequences"
            + (f", or raise data.max_bytes = {config.max_bytes}" if config.max_bytes else "")
        )
    sequences = f"{available} sequence{'' if available == 1 else 's'}"
    chosen = spread(
        available,
        getattr(config, setting),
        setting=setting,
        found=f"{found}, enough for {sequences} of {length}",
        remedy="a longer text or shorter sequences",
    )
    notes = _notes(tokens, what, config, tokenizer)
    if not tokens.facts["utf8"]:
        notes.append(f"note: {what} is not UTF-8 text; it is read as plain bytes")
    return WindowSet(tokens, length, chosen, notes)


def _notes(tokens: TokenFile, what: str, config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    notes = [f"note: {what}: {note}" for note in rejections(tokens)]
    if config.tokenizer != BYTES or config.document_marks != "tokenizer":
        notes.append(f"note: {describe_marks(tokenizer, config.document_marks)}")
    if tokens.facts["forced"]:
        notes.append(
            f"note: {what}: data.tokenizer does not split its text in {tokens.facts['forced']} "
            "places where it had to be cut; tokens there may differ"
        )
    return notes
