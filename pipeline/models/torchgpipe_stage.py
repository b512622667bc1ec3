"""torchgpipe inside one host: a stage whose module is spread over the host's own devices.

torchgpipe (Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models",
2020) runs GPipe over the devices of one process; between hosts the pipeline is ours. Its balancer
is here too, as the baseline of planners.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time


class LocalPipeline(nn.Module):
    """Consecutive layers over several devices of this host, as one module.

    `balance` says how many layers each device gets; input and output live on the first device. It
    runs under schedules with a whole backward only: torchgpipe cannot split input and weight
    gradients, as the zero-bubble schedules do.
    """

    whole_backward_only = True

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        devices: Sequence[torch.device | str],
        balance: Sequence[int],
        chunks: int,
        checkpoint: Literal["never", "except_last", "always"] = "never",
    ) -> None:
        """`chunks` is the number of microbatches inside this host.

        Raises:
            ValueError: the balance does not fit the layers or the devices.
        """
        super().__init__()
        if sum(balance) != len(layers) or len(balance) != len(devices) or min(balance) < 1:
            raise ValueError(
                f"balance = {list(balance)}: {len(layers)} layers on {len(devices)} devices need "
                f"{len(devices)} numbers of 1 or more that add up to {len(layers)}"
            )
        self._device = torch.device(devices[0])
        self.pipeline = GPipe(
            nn.Sequential(*layers),
            list(balance),
            devices=[torch.device(device) for device in devices],
            chunks=chunks,
            checkpoint=checkpoint,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers; `x` and the result are on the first device."""
        out: Tensor = self.pipeline(x)
        return out.to(self._device)


def torchgpipe_balance(
    layers: Sequence[nn.Module], sample: Tensor, *, partitions: int, timeout_s: float = 1.0
) -> list[int]:
    """Layers per partition as torchgpipe's `balance_by_time` sees it.

    Its profiler has no warm-up, and the first layer's first call can take many times its usual
    time, so one run over all layers is made and thrown away. It knows nothing of links.
    """
    model = nn.Sequential(*layers)
    model(sample)
    model.zero_grad()
    found: list[int] = balance_by_time(
        partitions, model, sample, timeout=timeout_s, device=sample.device
    )
    return found
