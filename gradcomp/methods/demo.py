"""DeMo / DisTrO: the strongest waves of each replica's momentum travel; signs move the parameters.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024; the preliminary report on
DisTrO (Nous Research 2024). Momenta differ between replicas and are never exchanged whole:

    D_w = decay D_w + g_w                       of each replica w
    C_w = the `kept` largest of each 64 x 64 tile of DCT(D_w)
    D_w -= iDCT(C_w)
    q   = iDCT(mean over those who sent it, of the signs of C_w)
    p  -= lr sign(q)

A message has 12 bits for each place and 1 for its sign, in one exchange for all parameters (the
released code sends 8 bytes a place, and two exchanges per tensor). With `delayed` an answer has the
time of a whole step: q is then that of the step before, and the first step moves nothing; the last
answer is not applied. Learning rates are a fraction of Adam's.

Axes: T tiles, S the side of one, N coefficients of all tiles.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from thinpipe.gradcomp.base import WithinSteps
from thinpipe.gradcomp.buckets import device_of
from thinpipe.gradcomp.exchange import ExchangeKey, gather_bytes
from thinpipe.gradcomp.late import LateExchange
from thinpipe.gradcomp.options import TrainOptions
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.wire.tile_topk import TileTopK

SIDE = 64  # as published; the 4,096 places of a tile fit `TileTopK`'s 12 bits
REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}


class Config(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """`kept` of the 4,096 coefficients of a tile are sent; the published settings."""

    kept: int = 32
    decay: float = Field(0.999, ge=0, le=1)
    delayed: bool = True

    @model_validator(mode="after")
    def _can_be_built(self) -> "Config":
        TileTopK(self.kept, 1)
        return self


class DeMo(WithinSteps):
    """A `ReplicaSync` that leaves q where the optimizer looks for gradients."""

    replicas_equal = REPLICAS_EQUAL
    leaves = "updates"

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers, config: Config) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._peers, self._config, self._codec = peers, config, TileTopK(config.kept, 1)
        self.overlaps = config.delayed
        device = device_of(parameters)
        self._tiles = Tiles([p.shape for p in self._parameters], device)
        self._momenta = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        self._left: list[Tensor] = []  # what this step leaves of the momenta, once it counts
        self._strongest_N: Tensor | None = None  # what it sends
        self._overlap = Overlap(device)
        self._late = LateExchange(self._overlap, self._submit)
        self._unapplied: Tensor | None = None
        """The answer that a step was given, until that counts: momenta have lost it already."""
        self._step = 0

    def begin_step(self, step: int, passes: int) -> None:
        self._step = step
        self._late.begin()

    def abandon(self) -> None:
        self._late.abandon()
        self._left, self._strongest_N = [], None

    def regroup(self, rank: int, size: int) -> None:
        """What this replica's momenta hold it sends later, to whoever is there."""

    def shared_state(self) -> dict[str, Any]:
        """Who joins begins with momenta of zero; it sends once more what replica 0 does, which it
        gets as bytes of a message, as all wait for it.
        """
        pending_N, wire_W = self._late.pending, None
        if pending_N is not None:
            nbytes = self._codec.capacity(pending_N.numel())
            wire_W = torch.empty(nbytes, dtype=torch.uint8, device=pending_N.device)
            self._codec.encode(pending_N[None], wire_W[None], noise=None)
        return {**self.state_dict(), "momenta": [], "pending": wire_W}

    def before_step(self) -> None:
        """Send what is strongest now; leave the answer, of this step or of the one before."""
        found = self._late.wait()
        finite, strongest_N = self._select()
        if self._config.delayed:
            self._strongest_N = strongest_N
        else:
            self._submit(strongest_N)
            found = self._overlap.join()
        self._leave(found[0] if found else self._unapplied, finite=finite)

    def commit(self) -> None:
        for answer_N in self._late.take():
            self._unapplied = answer_N

    def after_step(self) -> None:
        self._momenta, self._left = self._left, []
        self._unapplied = None
        self._late.pending, self._strongest_N = self._strongest_N, None

    def state_dict(self) -> dict[str, Any]:
        return {
            "momenta": self._momenta,
            "pending": self._late.pending,
            "unapplied": self._unapplied,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for momentum, saved in zip(self._momenta, state["momenta"] or self._momenta, strict=True):
            momentum.copy_(saved)
        pending, unapplied = state.get("pending"), state["unapplied"]
        if state.get("under_way") and state["counts"]:  # an earlier version had the answer then
            (unapplied,) = state["under_way"]
        device = device_of(self._parameters)
        if pending is not None and pending.dtype == torch.uint8:  # of a replica that joins
            wire_W, pending = pending, torch.empty(self._tiles.count * SIDE * SIDE)
            self._codec.decode(wire_W[None], pending[None])
        self._late.pending = None if pending is None else pending.to(device)
        self._unapplied = None if unapplied is None else unapplied.to(device)

    def _select(self) -> tuple[bool, Tensor]:
        """Whether all gradients are finite, and the coefficients of which the largest are sent."""
        gradients = [
            torch.zeros_like(m) if p.grad is None else p.grad.float() * self._peers.size
            for p, m in zip(self._parameters, self._momenta, strict=True)
        ]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if not finite:  # all replicas will skip this step; the others' messages must still come
            gradients = [torch.zeros_like(m) for m in self._momenta]
        momenta = [
            torch.add(gradient, momentum, alpha=self._config.decay)
            for gradient, momentum in zip(gradients, self._momenta, strict=True)
        ]
        coefficients = self._tiles.transform(momenta)
        sizes_TN = coefficients.abs().flatten(1)
        chosen_TK = sizes_TN.topk(self._config.kept, sorted=False).indices
        strongest = torch.zeros_like(sizes_TN)
        strongest.scatter_(1, chosen_TK, coefficients.flatten(1).gather(1, chosen_TK))
        sent = self._tiles.invert(strongest.view(-1, SIDE, SIDE))
        self._left = [m - s for m, s in zip(momenta, sent, strict=True)]
        return finite, strongest.flatten()

    def _submit(self, strongest_N: Tensor) -> None:
        key, peers, codec = ExchangeKey(self._step, 0), self._peers, self._codec

        def exchange() -> Tensor:
            sum_N, count_N = torch.zeros_like(strongest_N), torch.zeros_like(strongest_N)
            for payload in gather_bytes(peers, key, strongest_N, codec=codec):
                codec.add_to(payload, sum_N, count_N)
            return sum_N.div_(count_N.clamp_(min=1))

        self._overlap.launch(exchange)

    def _leave(self, answer_N: Tensor | None, *, finite: bool) -> None:
        if answer_N is None:
            answer_N = torch.zeros(
                self._tiles.count * SIDE * SIDE, device=device_of(self._parameters)
            )
        updates = self._tiles.invert(answer_N.view(-1, SIDE, SIDE))
        for parameter, update in zip(self._parameters, updates, strict=True):
            if not finite:
                update = torch.full_like(update, torch.nan)
            parameter.grad = update.to(parameter.dtype).contiguous()


class SignDescent(torch.optim.Optimizer):
    """Moves every parameter by the learning rate, against the sign of what it is given."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> DeMo:
    return DeMo(parameters, peers, config)


def optimizer(
    config: Config, parameters: Sequence[nn.Parameter], train: TrainOptions, sync: ReplicaSync
) -> torch.optim.Optimizer:
    return SignDescent(parameters, lr=train.lr, weight_decay=train.weight_decay)


def basis(device: torch.device) -> Tensor:
    """The orthonormal DCT-II: F F^T = 1."""
    wave = torch.arange(SIDE, dtype=torch.float64)
    matrix = torch.cos(math.pi / SIDE * wave[:, None] * (wave + 0.5)) * math.sqrt(2 / SIDE)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


class Tiles:
    """Tensors as 64 x 64 tiles of their cosine transform, one after the other.

    Matrices are padded with zeros; what has more dimensions is a matrix of its first one. Vectors
    are rows of 64, transformed by themselves. DCT-II is orthonormal, so lengths stay as they are.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._shapes, self._basis = tuple(shapes), basis(device)
        self._counts = [math.prod(_tiles(shape)) for shape in shapes]

    @property
    def count(self) -> int:
        return sum(self._counts)

    def transform(self, tensors: Sequence[Tensor]) -> Tensor:
        """Coefficients (fp32) of tensors with the shapes of these tiles: [T, S, S]."""
        return torch.cat(
            [
                _turned(_cut(tensor.float(), shape), shape, self._basis)
                for tensor, shape in zip(tensors, self._shapes, strict=True)
            ]
        )

    def invert(self, coefficients_TSS: Tensor) -> list[Tensor]:
        """The tensors that have these coefficients, less what padding would hold."""
        parts = torch.split(coefficients_TSS, self._counts)
        return [
            _joined(_turned(part, shape, self._basis.T), shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]


def _turned(tile_TSS: Tensor, shape: torch.Size, basis_SS: Tensor) -> Tensor:
    turned = tile_TSS @ basis_SS.T
    return basis_SS @ turned if len(shape) > 1 else turned


def _cut(tensor: Tensor, shape: torch.Size) -> Tensor:
    (rows, columns), (down, across) = _sides(shape), _tiles(shape)
    matrix = F.pad(tensor.flatten(), (0, rows * columns - tensor.numel())).view(rows, columns)
    padded = F.pad(matrix, (0, across * SIDE - columns, 0, down * SIDE - rows))
    return padded.view(down, SIDE, across, SIDE).transpose(1, 2).reshape(-1, SIDE, SIDE)


def _joined(tile_TSS: Tensor, shape: torch.Size) -> Tensor:
    (rows, columns), (down, across) = _sides(shape), _tiles(shape)
    grid = tile_TSS.view(down, across, SIDE, SIDE).transpose(1, 2)
    matrix = grid.reshape(down * SIDE, across * SIDE)[:rows, :columns]
    return matrix.flatten()[: shape.numel()].view(shape)


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of what is cut into tiles."""
    if len(shape) > 1:
        return shape[0], shape.numel() // shape[0]
    return -(-shape.numel() // SIDE), SIDE


def _tiles(shape: torch.Size) -> tuple[int, int]:
    rows, columns = _sides(shape)
    return -(-rows // SIDE), -(-columns // SIDE)
