"""Training and evaluation samples: running text, labelled texts, or prompts with responses.

`docs/data.md` describes the formats.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.chat.template import OWN, PLAIN
from thinpipe.launch.data.classification import LabelledSet, Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Chosen, Documents, Joined
from thinpipe.launch.data.encode import describe_marks, document_marks, encoder_for
from thinpipe.launch.data.own import OwnSet, Reading, load_own, made
from thinpipe.launch.data.packing import Layout, PackedSet, mix, pack
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.data.reading.saved import HUB
from thinpipe.launch.data.reading.source import Source, source_of
from thinpipe.launch.data.reading.text import HELD_OUT, Part
from thinpipe.launch.data.sample_set import SampleSet, Windows, WindowSet
from thinpipe.launch.data.token_file import TokenFile, rejections
from thinpipe.launch.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from thinpipe.launch.data.tokens.encoded import encoded_rows
from thinpipe.launch.data.tokens.running import Marks, running_tokens


def files(config: DataConfig) -> list[Path]:
    """The files that samples are read from: texts, tokenizer and chat template."""
    if config.factory is not None:
        return []
    paths = config.paths
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
    labelling: Labelling | None = None,
    drawn: int = 0,
) -> tuple[SampleSet, SampleSet]:
    """Return the training and the evaluation samples, from texts that do not overlap.

    `seed` decides mixtures and packing; `vocab` and `labelling` are those of the model; `drawn` is
    how many samples a run takes of a stream.

    Raises:
        ValueError: the path is missing, matches nothing or is empty; a row does not fit the
            settings; too few samples; the tokenizer has more tokens than the model.
        ImportError: an optional package is needed and not installed.
    """
    labelling = labelling or Labelling()
    if config.stream_block is not None:
        return _load_stream(config, seed=seed, vocab=vocab, labelling=labelling, drawn=drawn)
    if config.factory is not None:
        count = 0 if config.eval_sequences == "all" else config.eval_sequences
        return load_own(config.factory, config.eval_factory, count)
    tokenizer = _tokenizer(config, vocab)
    if config.kind == "text":
        return _load_text(config, tokenizer, seed)
    return _load_rows(config, tokenizer, seed, labelling)


def _tokenizer(config: DataConfig, vocab: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab is not None and tokenizer.vocab > vocab:
        raise ValueError(
            f"model.vocab = {vocab}: data.tokenizer = {config.tokenizer!r} has {tokenizer.vocab} "
            f"tokens; set model.vocab = {tokenizer.vocab}"
        )
    return tokenizer


def _load_stream(
    config: DataConfig, *, seed: int, vocab: int | None, labelling: Labelling, drawn: int
) -> tuple[SampleSet, SampleSet]:
    from thinpipe.launch.data.streams import blocks, stream  # for those who ask for it

    assert config.stream_block is not None, "asked of streams alone"
    make: stream.Make
    if config.factory is not None:
        dataset: Any = made(config.factory, "data.factory")
        items = stream.Items(lambda: dataset)
        make = partial(stream.own_block, config.source, Reading())
    else:
        items = stream.Items(blocks.rows_of(config))
        make = blocks.make_of(config, _tokenizer(config, vocab), seed, labelling)
    held_out: SampleSet
    if config.eval_path is not None:
        whole: dict[str, Any] = {"path": config.eval_path, "stream_block": None}
        whole |= {"train_sequences": config.eval_sequences}
        held_out, _ = load(
            config.model_copy(update=whole), seed=seed, vocab=vocab, labelling=labelling
        )
    elif config.eval_factory is not None:
        held_out = OwnSet(made(config.eval_factory, "data.eval_factory"), config.source)
    else:
        assert config.eval_sequences != "all", "checked with the settings"
        held_out = blocks.take_held_out(items, make, config.eval_sequences, config.source)
    training = stream.StreamSet(
        items, make, what=config.source, block=config.stream_block, seed=seed, total=drawn
    )
    return training, held_out


def _load_rows(
    config: DataConfig, tokenizer: Tokenizer, seed: int, labelling: Labelling
) -> tuple[SampleSet, SampleSet]:
    """Prompts, conversations or labelled texts: each source is encoded whole, then divided."""
    encoder = encoder_for(config, tokenizer, labelling)
    sources, rest = _sources(config)
    files = [encoded_rows(source, config.fields, encoder) for source in sources]
    others = [encoded_rows(source, config.fields, encoder) for source in rest]
    last = [(file.rows % HELD_OUT == HELD_OUT - 1) & (not rest) for file in files]
    parts = [*zip(files, last, strict=True)]
    training = _mixed([Chosen(file, np.flatnonzero(~own)) for file, own in parts], config, seed)
    held_out: list[Documents] = [Chosen(file, np.flatnonzero(own)) for file, own in parts]
    notes = [
        f"note: {source.what}: {note}"
        for source, file in zip([*sources, *rest], [*files, *others], strict=True)
        for note in rejections(file)
    ]

    def samples(documents: Documents, setting: str, notes: Sequence[str] = ()) -> SampleSet:
        if not len(documents):
            raise ValueError(
                f"{config.source}: fewer than {HELD_OUT} rows, so none is held out; "
                "set data.eval_path or use more rows"
            )
        if config.kind == "labelled":
            chosen = _selected(documents, setting, config)
            return LabelledSet(chosen, config.sequence_length, labelling, tuple(notes))
        return _packed(documents, setting, config, seed, notes)

    return (
        samples(training, "train_sequences", notes),
        samples(Joined(others or held_out), "eval_sequences"),
    )


def _packed(
    documents: Documents, setting: str, config: DataConfig, seed: int, notes: Sequence[str]
) -> PackedSet:
    prefix = config.objective == "prefix"
    found = pack(documents, Layout(config.sequence_length, config.packs, prefix, seed), notes)
    numbers = _numbers(len(found), setting, config)
    return found if numbers is None else found.select(numbers)


def _mixed(parts: Sequence[Documents], config: DataConfig, seed: int) -> Documents:
    if not config.sources:
        return parts[0]
    weights = [source.weight for source in config.sources]
    chosen = mix([len(part) for part in parts], weights, seed)
    return Joined([Chosen(part, own) for part, own in zip(parts, chosen, strict=True)])


def _load_text(config: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[SampleSet, SampleSet]:
    """Running text: whole documents, or windows over it."""
    sources, rest = _sources(config)
    field, limit = config.running_field, config.max_bytes
    begin, finish = document_marks(tokenizer, config.document_marks)
    marks = Marks(begin, finish) if begin or finish or config.packs else None

    def samples(sources: Sequence[Source], part: Part, setting: str) -> SampleSet:
        files = [
            running_tokens(source, part, field, tokenizer, limit=limit, marks=marks)
            for source in sources
        ]
        named = [*zip(files, (source.what for source in sources), strict=True)]
        notes = [note for file, what in named for note in _notes(file, what, config, tokenizer)]
        parts: Sequence[Documents] = files
        if not config.packs:
            parts = [_windows(*each, setting, config=config, tokenizer=tokenizer) for each in named]
        trained = setting == "train_sequences"
        documents = _mixed(parts, config, seed) if trained else Joined(parts)
        if config.packs:
            return _packed(documents, setting, config, seed, notes)
        return WindowSet(_selected(documents, setting, config), tuple(notes))

    return (
        samples(sources, "all" if rest else "training", "train_sequences"),
        samples(rest or sources, "all" if rest else "held out", "eval_sequences"),
    )


def _sources(config: DataConfig) -> tuple[list[Source], list[Source]]:
    """Those to train on, and to evaluate on: none if every tenth row or part is held out."""
    sources = [source_of(config, path, setting) for setting, path in config.paths.items()]
    if config.eval_path is not None:
        return sources, [source_of(config, config.eval_path, "data.eval_path")]
    rest = [source.held_out for source in sources if source.held_out is not None]
    return sources, rest if len(rest) == len(sources) else []


def _selected(documents: Documents, setting: str, config: DataConfig) -> Documents:
    numbers = _numbers(len(documents), setting, config)
    return documents if numbers is None else Chosen(documents, numbers)


def _numbers(found: int, setting: str, config: DataConfig) -> npt.NDArray[Any] | None:
    """As many as the setting says, spread evenly over those that there are; None: all."""
    wanted = getattr(config, setting)
    if wanted in ("all", found):
        return None
    if wanted > found:
        raise ValueError(
            f"data.{setting} = {wanted}: {config.source} gives {found} for it; use at most "
            f'{found}, "all", or more data'
        )
    return np.asarray(np.arange(wanted) * found // wanted)


def _windows(
    tokens: TokenFile, what: str, setting: str, *, config: DataConfig, tokenizer: Tokenizer
) -> Windows:
    length = config.sequence_length
    if not tokens.facts["bytes"] and tokens.rejected:
        raise ValueError(f"{what}: no row can be used: {'; '.join(rejections(tokens))}; correct it")
    if not tokens.facts["bytes"] and setting == "train_sequences":
        raise ValueError(f"{what}: the text is empty; name one with some text")
    windows = Windows(tokens, length)
    if not len(windows):
        raise ValueError(
            f"data.sequence_length = {length}: the text of {what} leaves {tokens.size} "
            f"{tokenizer.unit} for {setting} and one sequence takes {length + 1}; "
            "use a longer text or shorter sequences"
            + (f", or raise data.max_bytes = {config.max_bytes}" if config.max_bytes else "")
        )
    return windows


def _notes(tokens: TokenFile, what: str, config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    notes = [f"note: {what}: {note}" for note in rejections(tokens)]
    if config.tokenizer != BYTES or config.document_marks != "tokenizer":
        notes.append(f"note: {describe_marks(tokenizer, config.document_marks)}")
    if tokens.facts["forced"]:
        notes.append(
            f"note: {what}: data.tokenizer does not split its text in {tokens.facts['forced']} "
            "places where it had to be cut; tokens there may differ"
        )
    if not tokens.facts["utf8"]:
        notes.append(f"note: {what} is not UTF-8 text; it is read as plain bytes")
    return notes
