"""Two ends of a boundary in one process, and samples that change a little between visits."""

from typing import Any

import torch
from torch import Tensor

from thinpipe.aqsgd.transform.boundary import TransformBoundary
from thinpipe.aqsgd.transform.config import TransformConfig, build_transform

WIDTH, TOKENS = 32, 48


class Source:
    """Samples in few dimensions, which change by a tenth between visits."""

    def __init__(self, samples: int = 8, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._mix_DD = torch.linalg.qr(self._normal(WIDTH, WIDTH))[0] * torch.logspace(0, -3, WIDTH)
        self._base_BTD = self._normal(samples, TOKENS, WIDTH) @ self._mix_DD.T

    def visit(self, ids: list[int]) -> Tensor:
        change_BTD = self._normal(len(ids), TOKENS, WIDTH) @ self._mix_DD.T
        return self._base_BTD[ids] + 0.1 * change_BTD

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def ends(**options: Any) -> tuple[TransformBoundary, TransformBoundary]:
    spec = TransformConfig(**options)
    return build_transform(spec, width=WIDTH), build_transform(spec, width=WIDTH)


def send(
    sender: Any, receiver: Any, x_BTD: Tensor, ids: list[int], step: int = 0
) -> tuple[Tensor, int]:
    ids_B = torch.tensor(ids)
    plan, other = (end.plan(ids_B, x_BTD.shape, step=step) for end in (sender, receiver))
    assert (plan.capacity, plan.checksum) == (other.capacity, other.checksum)
    wire, out_BTD = torch.empty(plan.capacity, dtype=torch.uint8), torch.empty_like(x_BTD)
    used = sender.encode(plan, x_BTD, wire)
    receiver.decode(other, wire[:used], out_BTD)
    return out_BTD, used


def finish(*both: TransformBoundary, keep: bool = True) -> None:
    for end in both:
        end.finish_step(keep=keep)


def assert_alike(sender: TransformBoundary, receiver: TransformBoundary) -> None:
    assert sender.learned.digest() == receiver.learned.digest()
    if sender.memory is not None and receiver.memory is not None:
        assert sender.memory.digest() == receiver.memory.digest()


def visit(*both_x_ids_step: Any) -> tuple[Tensor, int]:
    """A step of one message, after which both ends are alike."""
    found = send(*both_x_ids_step)
    finish(*both_x_ids_step[:2])
    assert_alike(*both_x_ids_step[:2])
    return found


def train(
    sender: TransformBoundary, receiver: TransformBoundary, steps: range, seed: int = 0
) -> list[tuple[float, float]]:
    """(bits per value, relative error) of every step; samples are visited in random order."""
    source, found = Source(), []
    for step in range(steps.stop):
        ids = torch.randperm(8, generator=torch.Generator().manual_seed(step)).tolist()
        x_BTD = source.visit(ids)
        if step < steps.start:
            continue
        used, decoded = 0, []
        for half in (slice(0, 4), slice(4, 8)):
            out_BTD, nbytes = send(sender, receiver, x_BTD[half], ids[half], step)
            decoded.append(out_BTD)
            used += nbytes
        finish(sender, receiver)
        assert_alike(sender, receiver)
        error = float((torch.cat(decoded) - x_BTD).norm() / x_BTD.norm())
        found.append((8 * used / x_BTD.numel(), error))
    return found
