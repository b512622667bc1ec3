"""PowerSGD: gradients of matrices as products of two thin ones, with error feedback.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, Algorithm 1 (warm start: Q of the last step). torch's own form of it is
tied to DistributedDataParallel and its all-reduce; here its sums travel as all others do, over
`exchange.sum_sharded` in fp32.

    M   `matrices`   gradient plus residual, one matrix [n, m] per parameter
    P   `P`          M Q, summed over replicas, then orthogonalized
    Q   `_Q`         M^T P, summed over replicas; the next step starts from it

Parameters that `rank` columns would not make at least twice as small travel as they are.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, sum_sharded
from thinpipe.gradcomp.feedback import FeedbackReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers

_Named = tuple[str, list[Tensor]]
"""A parameter's name and its views of the target, the result and this replica's part of it."""
_LINALG = threading.Lock()
"""torch loads CUDA's linear algebra in the first call; made by two threads it fails (#90613)."""

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}


class Config(ExchangeOptions):
    """`rank`: columns of P and Q."""

    rank: int = Field(4, ge=1)


class PowerSGD(FeedbackReducer):
    """A reducer that keeps a residual per bucket and Q, alike on all, per matrix."""

    def __init__(self, peers: Peers, config: Config) -> None:
        super().__init__(peers, EXACT)
        self._config, self._Q = config, Staged()

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        target_N = self.add_to(f"{bucket.index}", flat_N)
        result_N, own_N = torch.empty_like(target_N), torch.empty_like(target_N)
        views = [bucket.views(vector) for vector in (target_N, result_N, own_N)]
        matrices: list[_Named] = []
        plain: list[_Named] = []
        for index, (parameter, *parts) in enumerate(zip(bucket.parameters, *views, strict=True)):
            shape = (len(parameter), -1) if parameter.dim() > 1 else (1, -1)
            group = matrices if self._pays(parts[0].view(shape)) else plain
            group.append((f"{bucket.index}.{index}", [part.view(shape) for part in parts]))
        P = [target @ self._start(name, target) for name, (target, _, _) in matrices]
        keys = (ExchangeKey(2 * key.step, key.bucket), ExchangeKey(2 * key.step + 1, key.bucket))
        sums = self._sum([*P, *(target for _, (target, _, _) in plain)], keys[0])
        with _LINALG:
            P = [torch.linalg.qr(total)[0] for total in sums[: len(matrices)]]
        Q = [M.T @ p for (_, (M, _, _)), p in zip(matrices, P, strict=True)]
        for (name, (_, result, own)), p, mine, total in zip(
            matrices, P, Q, self._sum(Q, keys[1]), strict=True
        ):
            torch.matmul(p, mine.T, out=own)
            torch.matmul(p, total.T, out=result)
            self._Q.set(name, total)
        for (_, (target, result, own)), total in zip(plain, sums[len(matrices) :], strict=True):
            result.copy_(total)
            own.copy_(target)
        self.set(f"{bucket.index}", target_N - own_N)
        return result_N

    def keep(self) -> None:
        super().keep()
        self._Q.keep()

    def drop(self) -> None:
        super().drop()
        self._Q.drop()

    def shared_state(self) -> dict[str, Any]:
        """Q; who joins owes nothing."""
        return {"residuals": {}, "Q": self._Q.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": super().state_dict(), "Q": self._Q.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["residuals"])
        self._Q.load_state_dict(state["Q"])

    def _pays(self, matrix: Tensor) -> bool:
        n, m = matrix.shape
        return 2 * self._config.rank * (n + m) <= n * m

    def _start(self, name: str, target: Tensor) -> Tensor:
        Q = self._Q.get(name, target.device)
        if Q is None:
            generator = torch.Generator().manual_seed(0)
            Q = torch.randn(target.shape[1], self._config.rank, generator=generator)
        return Q.to(target.device)

    def _sum(self, tensors: Sequence[Tensor], key: ExchangeKey) -> list[Tensor]:
        if not tensors:
            return []
        flat_N = torch.cat([tensor.flatten() for tensor in tensors])
        total_N = sum_sharded(self._peers, key, flat_N, codec=self._codec)
        parts = torch.split(total_N, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    return GradientSync(parameters, peers, PowerSGD(peers, config), config.bucket_nbytes)
