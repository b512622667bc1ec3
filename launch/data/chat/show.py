"""Samples as text, with what of them is learnt.

Axes: B samples, T tokens.
"""

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from thinpipe.pipeline.batch import IGNORED_TARGET, Batch

_LEARNT, _GIVEN = ("+", "bold green"), (".", "dim")
Decode = Callable[[list[int]], str]


def show_examples(console: Console, batch: Batch, decode: Decode) -> None:
    """Print samples: a line that begins with + is learnt, one with a dot is only read."""
    for number in range(len(batch)):
        targets = batch.targets[number]
        parts = [*_parts(batch, number)]
        tokens = sum(len(ids) for ids, _ in parts)
        learnt = int((targets != IGNORED_TARGET).sum())
        said = f"{learnt} learnt" if targets.ndim else f"label {int(targets)}"
        what = "" if len(parts) == 1 else f", {len(parts)} examples"
        console.print(f"sample {number}: {tokens} tokens, {said}{what}")
        for ids, counts in parts:
            for line in _lines(ids, counts, decode):
                console.print(line, soft_wrap=True)
            if len(parts) > 1:
                console.print()


def _parts(batch: Batch, number: int) -> Iterator[tuple[list[int], list[bool]]]:
    inputs_T = batch.inputs_BT[number]
    mask_T = torch.ones_like(inputs_T) if batch.mask_BT is None else batch.mask_BT[number]
    segments_T = mask_T if batch.segments_BT is None else batch.segments_BT[number]
    for segment in torch.unique_consecutive(segments_T[mask_T != 0]).tolist():
        own = (segments_T == segment) & (mask_T != 0)
        targets = batch.targets[number]
        yield _example(inputs_T[own], targets[own] if targets.ndim else None)


def _example(inputs_T: Tensor, targets_T: Tensor | None) -> tuple[list[int], list[bool]]:
    ids = inputs_T.tolist()
    if targets_T is None:
        return ids, [False] * len(ids)
    counts = [False, *(targets_T != IGNORED_TARGET).tolist()]
    last = int(targets_T[-1])
    return (ids, counts[:-1]) if last == IGNORED_TARGET else ([*ids, last], counts)


def _lines(ids: list[int], counts: list[bool], decode: Decode) -> Iterator[Text]:
    """One for each run of tokens that are alike; spaces that begin a run are kept."""
    stop, shown = 0, 0
    for learnt, run in groupby(counts):
        stop += len([*run])
        whole = decode(ids[:stop])
        sign, style = _LEARNT if learnt else _GIVEN
        yield Text(f"  {sign} {_escaped(whole[shown:])}", style=style)
        shown = len(whole)


def _escaped(text: str) -> str:
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()
        for char in text
    )
