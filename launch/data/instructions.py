"""Prompts with responses: loss on the response alone, mixtures of files, packing.

Mixing and packing are drawn once, from the run's seed: a sample id must mean the same tokens in
every epoch, as AQ-SGD caches activations by id.

Axes: N sequences, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet
from thinpipe.launch.data.sampler import shuffled
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.loss import IGNORED_TARGET

_OPEN = 64  # sequences that packing tries to fill before it starts another


@dataclass(frozen=True)
class Example:
    """Token ids of prompt, response and end; the first `prompt` of them are the prompt."""

    tokens: tuple[int, ...]
    prompt: int

    @property
    def inputs(self) -> int:
        """Tokens it takes up in a sequence: all but the last are inputs."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Layout:
    """How examples become sequences of `length` tokens."""

    length: int
    packing: bool
    prefix: bool
    seed: int


def encode_examples(
    rows: Sequence[Row], prompt: Field, response: Field, *, tokenizer: Tokenizer
) -> list[Example]:
    """Tokens of every row. Nothing is inserted between prompt and response.

    Raises:
        ValueError: a row lacks a field, or it is empty.
    """
    end = tokenizer.end
    found = []
    for row in rows:
        asked = tokenizer.encode(row.text(prompt))
        found.append(Example((*asked, *tokenizer.encode(row.text(response)), end), len(asked)))
    return found


def mix(sources: Sequence[Sequence[Row]], weights: Sequence[float] | None, seed: int) -> list[Row]:
    """Rows of all sources, as many of each as its weight demands and none twice.

    The source that is the shortest for its weight is used up; without weights all are.
    """
    if weights is None:
        return [row for rows in sources for row in rows]
    most = min(len(rows) / weight for rows, weight in zip(sources, weights, strict=True))
    mixed: list[Row] = []
    for number, (rows, weight) in enumerate(zip(sources, weights, strict=True)):
        count = min(len(rows), max(1, round(most * weight)))
        chosen = shuffled(len(rows), seed, f"mix/{number}")[:count]
        mixed += [rows[index] for index in sorted(chosen.tolist())]
    return mixed


def instruction_set(examples: Sequence[Example], layout: Layout) -> ColumnSet:
    """Sequences of examples, padded; targets are -100 outside responses.

    Raises:
        ValueError: every example is longer than a sequence.
    """
    fitting = [example for example in examples if example.inputs <= layout.length]
    notes = []
    if len(fitting) < len(examples):
        what = f"data.sequence_length = {layout.length}: {len(examples) - len(fitting)} of "
        what += f"{len(examples)} examples are longer"
        if not fitting:
            longest = max(example.inputs for example in examples)
            raise ValueError(f"{what}; use longer sequences, up to {longest}")
        notes.append(f"note: {what} and are left out")
    groups = _pack(fitting, layout) if layout.packing else [[example] for example in fitting]
    return ColumnSet(_columns(groups, layout), notes)


def _pack(examples: Sequence[Example], layout: Layout) -> list[list[Example]]:
    """First fit over the examples in an order drawn from the seed."""
    done: list[list[Example]] = []
    open_groups: list[tuple[list[Example], int]] = []
    for index in shuffled(len(examples), layout.seed, "pack").tolist():
        example = examples[index]
        for at, (group, room) in enumerate(open_groups):
            if example.inputs <= room:
                group.append(example)
                open_groups[at] = (group, room - example.inputs)
                break
        else:
            open_groups.append(([example], layout.length - example.inputs))
        if len(open_groups) > _OPEN:
            fullest = min(range(len(open_groups)), key=lambda at: open_groups[at][1])
            done.append(open_groups.pop(fullest)[0])
    return done + [group for group, _ in open_groups]


def _columns(groups: Sequence[Sequence[Example]], layout: Layout) -> Batch:
    shape = (len(groups), layout.length)
    inputs_NT = torch.zeros(shape, dtype=torch.int32)
    targets_NT = torch.full(shape, IGNORED_TARGET, dtype=torch.int32)
    segments_NT = torch.zeros(shape, dtype=torch.int32)
    prefix_NT = torch.zeros(shape, dtype=torch.bool)
    for number, group in enumerate(groups):
        start = 0
        for segment, example in enumerate(group, start=1):
            stop = start + example.inputs
            tokens = torch.tensor(example.tokens, dtype=torch.int32)
            inputs_NT[number, start:stop] = tokens[:-1]
            first = max(example.prompt - 1, 0)  # predicted from the prompt's last token
            targets_NT[number, start + first : stop] = tokens[first + 1 :]
            segments_NT[number, start:stop] = segment
            prefix_NT[number, start : start + example.prompt] = True
            start = stop
    return Batch(
        inputs_NT,
        targets_NT,
        torch.arange(len(groups)),
        mask_BT=segments_NT > 0,
        segments_BT=segments_NT if layout.packing else None,
        prefix_BT=prefix_NT if layout.prefix else None,
    )
