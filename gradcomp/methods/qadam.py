"""QAdam: after a warm-up Adam's variance stays as it is, and its momentum travels at 8 bits.

Tang et al., "1-bit Adam", ICML 2021; Gan et al., "BAGUA", VLDB 2022. In the first `warmup_steps`
gradients are summed exactly and Adam is Adam. Then, with G the mean over replicas,

    m_w = b1 m + (1 - b1) g_w      every replica, from the momentum that all share
    m   = mean of the m_w          quantized on both ways, with error feedback on both
    p  -= lr (m / (1 - b1^t)) / (sqrt(v_T / (1 - b2^T)) + eps)

v_T is the variance of step T, the last of the warm-up, and so is its bias correction: BAGUA lets
that of v go on to shrink, by which steps grow threefold over a thousand steps.

When v_T is frozen it is raised to a share of its tensor's mean: a token that was not seen until
then has a variance of 0, and its first gradient would be divided by eps.

Axes: N values of a bucket.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, sum_sharded
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions, TrainOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}
_EPS = 1e-8  # as torch's Adam
_LEAST = 0.1
"""Of the mean variance of a tensor, what a frozen one is at least. At 0 training diverged: tokens
not seen in 64 warm-up steps moved without limit
(benchmarks/results/replicas_gpt2_cpu_202611.md)."""


class Config(ExchangeOptions):
    """`bits` per value of the momentum.

    `warmup_steps` is how long the variance is learnt. `beta1` is that of the momentum, in place of
    the first of `train.betas`.
    """

    bits: int = Field(8, ge=1, le=8)
    warmup_steps: int = Field(100, ge=1)
    beta1: float = Field(0.9, ge=0, lt=1)


class Momentum(ServedReducer):
    """A reducer of gradients at first, then of momenta."""

    def __init__(self, peers: Peers, config: Config) -> None:
        super().__init__(peers, Uniform(config.bits, config.group))
        self.steps = 0
        """Steps that were kept."""
        self._config = config
        self._momenta = Staged()

    @property
    def warming_up(self) -> bool:
        return self.steps < self._config.warmup_steps

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        name, beta1 = str(bucket.index), self._config.beta1
        old_N = self._momenta.get(name, flat_N.device)
        old_N = torch.zeros_like(flat_N) if old_N is None else old_N
        if self.warming_up:
            sum_N = sum_sharded(self._peers, key, flat_N, codec=EXACT)
            self._momenta.set(name, beta1 * old_N + (1 - beta1) * sum_N)
            return sum_N
        mine_N = (1 - beta1) * flat_N + (beta1 / self._peers.size) * old_N
        new_N = super().reduce(bucket, mine_N, key)
        self._momenta.set(name, new_N)
        return new_N

    def take_over(self, state: Mapping[Tensor, Any], buckets: Sequence[Bucket]) -> None:
        """Go on from an optimizer's momenta, which are equal on all replicas."""
        self.steps = max((each["step"] for each in state.values()), default=0)
        for bucket in buckets if self.steps else ():
            known = [
                state[p]["m"] if p in state else torch.zeros_like(p) for p in bucket.parameters
            ]
            self._momenta.set(str(bucket.index), torch.cat([m.flatten().float() for m in known]))
        self._momenta.keep()

    def keep(self) -> None:
        super().keep()
        self.steps += 1
        self._momenta.keep()

    def drop(self) -> None:
        super().drop()
        self._momenta.drop()

    def shared_state(self) -> dict[str, Any]:
        """Who joins takes momenta over from its optimizer (`take_over`), as after 0 steps.

        During the warm-up those are of clipped gradients; the first exchange averages that away.
        """
        return {"residuals": super().shared_state(), "steps": 0, "momenta": {}}

    def state_dict(self) -> dict[str, Any]:
        momenta = self._momenta.state_dict()
        return {"residuals": super().state_dict(), "steps": self.steps, "momenta": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["residuals"])
        self._momenta.load_state_dict(state["momenta"])
        self.steps = state["steps"]


class QAdamSync(GradientSync):
    """Leaves momenta, which are not to be clipped, once the warm-up is over."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], peers: Peers, momentum: Momentum, nbytes: int
    ) -> None:
        super().__init__(parameters, peers, momentum, nbytes, alone=True)
        self._momentum = momentum
        self._optimizer: torch.optim.Optimizer | None = None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave what this optimizer waits for, gradients or momenta."""
        self._optimizer = optimizer

    def begin_step(self, step: int, passes: int) -> None:
        """A run that goes on under another layout has the momenta in its optimizer alone."""
        if self._momentum.steps == 0 and self._optimizer is not None:
            self._momentum.take_over(self._optimizer.state, self._buckets)
        super().begin_step(step, passes)

    @property
    def leaves(self) -> Literal["gradients", "updates"]:  # type: ignore[override]
        return "gradients" if self._momentum.warming_up else "updates"


class QAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, given gradients at first and then finished momenta."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_steps: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self._warmup_steps = warmup_steps

    def load_state_dict(self, state_dict: Any) -> None:
        """Moments stay in fp32: torch's makes them of the parameters' kind."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            for name in ("m", "v") if number in state_dict["state"] else ():
                saved = state_dict["state"][number][name]
                self.state[parameter][name] = saved.to(parameter.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, given: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["v"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        step, m, v = state["step"], state["m"], state["v"]
        if step <= self._warmup_steps:
            m.lerp_(given.float(), 1 - beta1)
            v.mul_(beta2).addcmul_(given.float(), given.float(), value=1 - beta2)
        else:
            m.copy_(given)
        learnt = 1 - beta2 ** min(step, self._warmup_steps)
        scale = (v.sqrt() / math.sqrt(learnt)).add_(_EPS)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        move = group["lr"] / (1 - beta1**step)
        parameter.addcdiv_(m.to(parameter.dtype), scale.to(parameter.dtype), value=-move)
        if step == self._warmup_steps:
            v.clamp_(min=_LEAST * v.mean())


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> QAdamSync:
    return QAdamSync(parameters, peers, Momentum(peers, config), config.bucket_nbytes)


def optimizer(
    config: Config, parameters: Sequence[nn.Parameter], train: TrainOptions, sync: ReplicaSync
) -> torch.optim.Optimizer:
    adam = QAdam(
        parameters,
        lr=train.lr,
        betas=(config.beta1, train.betas[1]),
        weight_decay=train.weight_decay,
        warmup_steps=config.warmup_steps,
    )
    assert isinstance(sync, QAdamSync)
    sync.follow(adam)
    return adam
