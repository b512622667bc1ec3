"""The sparse kernels on CPUs, compiled by numba: vectors of a run or of 16 mask bits, no GIL.

A subset costs what its own runs cost: nothing walks over the whole vector. The choice of the
largest values is in `topk.py`.
"""

from typing import Any

import numpy as np
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.run_ir import (
    CHUNK,
    expand_chunk,
    put_run,
    take_run,
    update_run,
)
from thinpipe.pipeline.wire.kernels.cpu.topk import select_top
from thinpipe.pipeline.wire.kernels.cpu.windows import STORED_AS

select = select_top


def gather(x_N: Tensor, base_N: Tensor | None, start_R: Tensor, run: int, out_n: Tensor) -> None:
    base = None if base_N is None else _flat(base_N)
    _gather(_flat(x_N), base, start_R.numpy(), run, _flat(out_n))


def scatter(value_n: Tensor, start_R: Tensor, run: int, out_N: Tensor) -> None:
    _scatter(_flat(value_n), start_R.numpy(), run, _flat(out_N))


def place(mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
    _place(mask_M.numpy(), _flat(kept_k), None, _flat(out_n))


def place_add(mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
    out = _flat(out_n)
    _place(mask_M.numpy(), _flat(kept_k), out, out)


def apply_exchanged(
    sent_n: Tensor, mean_n: Tensor, start_R: Tensor, run: int, x_N: Tensor, base_N: Tensor
) -> None:
    _apply_exchanged(_flat(sent_n), _flat(mean_n), start_R.numpy(), run, _flat(x_N), _flat(base_N))


def _flat(t_N: Tensor) -> Any:
    """A vector's memory, in the element type that stands for its format."""
    assert t_N.is_contiguous(), "a vector must be contiguous"
    return t_N.detach().view(STORED_AS[t_N.dtype]).numpy()


@compiled
def _gather(x: Any, base: Any, starts: Any, run: Any, out: Any) -> Any:
    done = 0
    for i in range(starts.size):
        start = starts[i]
        count = min(run, x.size - start)
        take_run(x, base, out, (start, start, done, count))
        done += count


@compiled
def _scatter(value: Any, starts: Any, run: Any, out: Any) -> Any:
    done = 0
    for i in range(starts.size):
        count = min(run, out.size - starts[i])
        put_run(value, out, (done, starts[i], count))
        done += count


@compiled
def _apply_exchanged(sent: Any, mean: Any, starts: Any, run: Any, x: Any, base: Any) -> Any:
    done = 0
    for i in range(starts.size):
        start = starts[i]
        count = min(run, x.size - start)
        update_run(sent, mean, x, base, (done, done, start, start, count))
        done += count


@compiled
def _place(mask: Any, kept: Any, known: Any, out: Any) -> Any:
    used, full = 0, out.size // CHUNK * CHUNK
    for i in range(0, full, CHUNK):
        used += expand_chunk(mask, kept, known, out, (i // 8, used, i))
    for i in range(full, out.size):
        flagged = (mask[i // 8] >> np.uint8(i % 8)) & np.uint8(1)
        if known is None:
            out[i] = kept[used] if flagged else np.float32(0.0)
        elif flagged:
            out[i] += kept[used]
        used += flagged
