"""Training and evaluation samples: running text, labelled texts, or prompts with responses.

`docs/data.md` describes the formats.
"""

from collections.abc import Sequence
from pathlib import Path

from thinpipe.launch.data.classification import labelled_set
from thinpipe.launch.data.columns import Field as RowField
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.instructions import Layout, encode_examples, instruction_set, mix
from thinpipe.launch.data.own import load_own
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.data.reading.saved import HUB
from thinpipe.launch.data.reading.source import Source, open_source
from thinpipe.launch.data.reading.text import HELD_OUT, Part
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet, SampleSet, WindowSet, spread
from thinpipe.launch.data.token_file import TokenFile, rejections
from thinpipe.launch.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from thinpipe.launch.data.tokens.running import running_tokens


def files(config: DataConfig) -> list[Path]:
    """The files that samples are read from: texts and tokenizer.

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
    local = {name: path for name, path in paths.items() if not (path or "").startswith(HUB)}
    return [file for name, path in local.items() for file in find_files(path, name)]


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
        return _load_text(config, tokenizer)
    rows = _read_rows(config, seed)
    sets = [_samples(part, config, tokenizer, seed=seed, classes=classes) for part in rows]
    return (
        _selected(sets[0], "train_sequences", config=config),
        _selected(sets[1], "eval_sequences", config=config),
    )


def _load_text(config: DataConfig, tokenizer: Tokenizer) -> tuple[WindowSet, WindowSet]:
    source = _source(config, config.path, "data.path")
    rest = source.held_out
    if config.eval_path is not None:
        rest = _source(config, config.eval_path, "data.eval_path")
    field, limit = _text_field(config), config.max_bytes

    def windows(source: Source, part: Part, setting: str) -> WindowSet:
        tokens = running_tokens(source, part, field, tokenizer, limit=limit)
        return _windows(tokens, setting, source.what, config=config, tokenizer=tokenizer)

    return (
        windows(source, "training" if rest is None else "all", "train_sequences"),
        windows(rest or source, "held out" if rest is None else "all", "eval_sequences"),
    )


def _source(config: DataConfig, path: str | None, setting: str) -> Source:
    kind = None if config.format == "auto" else config.format
    return open_source(path, setting, kind=kind, fields=config.fields)


def _text_field(config: DataConfig) -> RowField:
    return "text" if config.text_field is None else config.text_field


def _read_rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    opened = [
        _source(config, source.path, f"data.sources.{number}.path")
        for number, source in enumerate(config.sources)
    ] or [_source(config, config.path, "data.path")]
    weights = [source.weight for source in config.sources] or None
    found = [source.rows(config.fields) for source in opened]
    rest = [source.held_out for source in opened]
    if config.eval_path is not None:
        rest = [_source(config, config.eval_path, "data.eval_path")]
    if all(rest):
        held_out = [row for source in rest if source for row in source.rows(config.fields)]
        return mix(found, weights, seed), held_out
    parts = [_hold_out(rows) for rows in found]
    held_out = [row for _, rest in parts for row in rest]
    return mix([training for training, _ in parts], weights, seed), held_out


def _hold_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every tenth row is held out."""
    last = HELD_OUT - 1
    kept = [row for number, row in enumerate(rows) if number % HELD_OUT != last]
    return kept, list(rows[last::HELD_OUT])


def _samples(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, *, seed: int, classes: int
) -> ColumnSet:
    length = config.sequence_length
    if not rows:
        raise ValueError(
            f"{config.source}: fewer than {HELD_OUT} rows, so none is held out; "
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


def _windows(
    tokens: TokenFile, setting: str, what: str, *, config: DataConfig, tokenizer: Tokenizer
) -> WindowSet:
    length = config.sequence_length
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
    notes = [f"note: {what}: {note}" for note in rejections(tokens)]
    if not tokens.facts["utf8"]:
        notes.append(f"note: {what} is not UTF-8 text; it is read as plain bytes")
    if tokens.facts["forced"]:
        notes.append(
            f"note: {what}: data.tokenizer does not split its text in {tokens.facts['forced']} "
            "places where it had to be cut; tokens there may differ"
        )
    return WindowSet(tokens, length, chosen, notes)
