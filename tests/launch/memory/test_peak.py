"""The most that tensors take in a step is what was counted for it."""

from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.single_process import in_process
from tests.training import batch, config
from thinpipe.launch.memory.model import rank_memory


class Held(TorchDispatchMode):
    """Bytes of all storages that operations made and that still live, and the most that did."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._noted = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._noted += storage.nbytes()
        if self._noted > self.most:  # as if none had died
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self._noted = sum(nbytes for _, nbytes in self._alive.values())
            self.most = max(self.most, self._noted)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return out


@pytest.mark.parametrize(
    ("precision", "microbatches", "checkpointing"),
    [
        pytest.param("fp32", 1, False, marks=pytest.mark.slow),
        pytest.param("fp32", 4, True, marks=pytest.mark.slow),
        pytest.param("bf16", 4, False, marks=pytest.mark.slow),
        ("bf16", 4, 2),
    ],
)
def test_a_step_takes_what_is_counted(
    precision: str, microbatches: int, checkpointing: bool | int
) -> None:
    run = config(
        model={"layers": 6, "width": 128, "activation_checkpointing": checkpointing},
        pipeline={
            "cuts": [],
            "microbatches": microbatches,
            "precision": precision,
            "schedule": "GPipe",
        },
    )
    with in_process(run, total_steps=3) as built:
        built.engine.train_step(batch(list(range(8))), 0)  # makes the optimizer's state
        with Held() as held:
            for value in tree_leaves(dict(built.optimizer.state)):
                if isinstance(value, Tensor):
                    held.note(value)
            for stage in built.stages:
                for parameter in stage.submod.parameters():
                    held.note(parameter)
            built.engine.train_step(batch(list(range(8, 16))), 1)
    (counted,) = rank_memory(run)
    # both gradients and what they take the place of are counted
    assert 0.97 * held.most < counted.total < 1.25 * held.most
