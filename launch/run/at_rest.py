"""Weights and optimizer state change in an optimizer step only; in between, RAM is held to that.

Right after a step digests are taken, and right before the next one changes anything they are
compared. What differs then was changed by nobody: a faulty memory, or a program that writes where
it must not. Both passes together may take a stated share of a step's time; where that is not enough
for all, pieces take turns. A save is proven too: digests of all are taken, and what is to be
written must match them.

A bit that flips while a step computes (in gradients, activations, or the new weights themselves) is
not found here. Replicas find it (`proof.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from thinpipe.launch.checkpoint.reshard import module_of, parameter_names
from thinpipe.launch.components import Built
from thinpipe.launch.config.toml import ConfigError

_PIECE_NBYTES = 2**22

Path = tuple[str | int, ...]
"""Where a checkpoint has a tensor: the keys that lead to it."""


class CorruptionError(ConfigError):
    """What should be equal is not, and nobody knows which is right."""


class _Piece(NamedTuple):
    name: str
    path: Path
    start: int
    data: Tensor  # a view: each digest reads memory anew

    def digest(self) -> int:
        return xxhash.xxh3_64_intdigest(_bytes(self.data).cpu().numpy().data)


class AtRest:
    """The watch of one rank; nothing is sent."""

    def __init__(self, built: Built, share: float, *, rank: int) -> None:
        """`share` is how much of the time may be spent; 0 turns it off."""
        self._built, self._share, self._rank = built, share, rank
        self._taken: list[tuple[_Piece, int]] = []
        self._next = self._steps = 0
        self._left_s, self._saves = 0.0, False
        self._covered = self._spent_s = self._steps_s = 0.0
        built.optimizer.register_step_pre_hook(lambda *_: self.compare())

    def take(self, step: int, step_s: float, *, saves: bool) -> None:
        """Take digests after `step` steps, the last of `step_s` seconds: of all if it `saves`."""
        if not self._share:
            return
        began_s, allowed_s = time.perf_counter(), self._share * step_s
        # what took longer than it should is made up for; a save's share is the save's
        self._left_s = min(self._left_s + allowed_s, 2 * allowed_s)
        limit_s = began_s + self._left_s / 2
        self._taken = []
        self._steps, self._steps_s = self._steps + 1, self._steps_s + step_s
        if self._left_s <= 0 and not saves:  # a piece takes longer than the share of a short step
            return
        self._step, self._saves, pieces = step, saves, list(_pieces(self._built))
        total = sum(piece.data.nbytes for piece in pieces)
        first = 0 if saves else self._next % max(1, len(pieces))
        for piece in (*pieces[first:], *pieces[:first]):
            self._taken.append((piece, piece.digest()))
            if not saves and time.perf_counter() > limit_s:
                break
        self._next = first + len(self._taken)
        self._covered += sum(piece.data.nbytes for piece, _ in self._taken) / max(1, total)
        self._spend(began_s)

    def compare(self) -> None:
        """Before anything changes again.

        Raises:
            CorruptionError: something has changed meanwhile; the message names it.
        """
        if not self._taken:
            return
        began_s = time.perf_counter()
        changed = [piece.name for piece, digest in self._taken if piece.digest() != digest]
        self._taken = []
        self._spend(began_s)
        if changed:
            first, more = list(dict.fromkeys(changed))[:4], " and more" * (len(set(changed)) > 4)
            raise CorruptionError(
                f"rank {self._rank}: {', '.join(first)}{more} changed "
                f"in memory after step {self._step}, when nothing may change them: this machine's "
                "memory is faulty, or a program writes over it (if yours means to, set "
                "train.verify_share = 0); test or replace the machine, then go on from the last "
                "checkpoint with --resume"
            )

    def _spend(self, since_s: float) -> None:
        if not self._saves:
            spent_s = time.perf_counter() - since_s
            self._left_s -= spent_s
            self._spent_s += spent_s

    def seal(self) -> Callable[[Any], str | None]:
        """For a checkpoint of now, made after `take` of all: says what of it is not as it was."""
        digests: dict[Path, list[tuple[_Piece, int]]] = {}
        for piece, digest in self._taken:
            digests.setdefault(piece.path, []).append((piece, digest))
        return lambda state: _differing(state, digests)

    def words(self) -> str | None:
        """How much was verified, and what that cost; None if nothing was."""
        if not self._steps_s:
            return None
        covered, cost = self._covered / self._steps, self._spent_s / self._steps_s
        return (
            f"weights and optimizer state were verified in memory: {covered:.0%} of them from step "
            f"to step, for {cost:.2%} of the time"
        )


def _pieces(built: Built) -> Iterator[_Piece]:
    for name, path, tensor in _tensors(built):
        rows = tensor.detach()
        if rows.is_contiguous():
            rows = rows.flatten()
        start, row_nbytes = 0, rows.nbytes // max(1, len(rows))
        for part in torch.split(rows, max(1, _PIECE_NBYTES // max(1, row_nbytes))):
            yield _Piece(name, path, start, part)
            start += part.nbytes


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensors(built: Built) -> Iterator[tuple[str, Path, Tensor]]:
    """Name, place in a checkpoint, and tensor of all that only an optimizer step may change."""
    if built.sync.replicas_equal:  # other methods change weights at other times too
        for stage in built.stages:
            for name, parameter in module_of(stage).named_parameters():
                place = f"{name} of stage {stage.stage_index}"
                yield place, ("model", str(stage.stage_index), name), parameter
    parameters = [p for group in built.optimizer.param_groups for p in group["params"]]
    names = parameter_names(built)
    for index, (parameter, known) in enumerate(zip(parameters, names, strict=True)):
        for field, value in built.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{field} of {known[0]}", ("optimizer", "state", index, field), value


def _differing(state: Any, digests: Mapping[Path, list[tuple[_Piece, int]]]) -> str | None:
    for path, taken in digests.items():
        found: Any = state
        for key in path:
            found = found[key]
        flat = _bytes(found.detach())
        for piece, digest in taken:
            copied = flat[piece.start : piece.start + piece.data.nbytes]
            if piece._replace(data=copied).digest() != digest:
                return f"{piece.name} is not as the step left it: memory of this machine is faulty"
    return None
