"""A bucket of parameters of which all replicas keep a global copy next to their own.

Axes: N values of a bucket, n values of a shard.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.subset import Subset


class FlatBucket:
    """The parameters of a bucket as views of one vector."""

    def __init__(self, bucket: Bucket) -> None:
        """Parameters keep their values; their storage becomes a view of `local_N`."""
        self.index, self._bucket = bucket.index, bucket
        self.local_N = torch.cat([p.detach().flatten() for p in bucket.parameters])
        for parameter, view in zip(bucket.parameters, bucket.views(self.local_N), strict=True):
            parameter.data = view

    def check_storage(self) -> None:
        """Notice parameters that were given other storage, which would no longer be exchanged.

        Raises:
            RuntimeError: a parameter is no view of the vector any more.
        """
        views = self._bucket.views(self.local_N)
        for parameter, view in zip(self._bucket.parameters, views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got other storage after the "
                    "exchange was built; load weights in place (load_state_dict without assign)"
                )


class SharedBucket(FlatBucket):
    """Parameters next to the global copy of them (fp32); their difference is not yet sent.

    Moving parameters in bf16 by steps below their resolution would lose the steps: what rounding
    takes is kept in `left_N` and counts as part of the parameters.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.global_N = self.local_N.float().clone()
        exact = self.local_N.dtype == torch.float32
        self.left_N = None if exact else torch.zeros_like(self.global_N)
        """State of this replica besides its parameters."""

    def capture(self) -> None:
        """Take the parameters as they are for the global ones: replicas are equal now."""
        self.global_N.copy_(self.local_N)

    def digest(self) -> int:
        return crc32(self.global_N.cpu())

    def moved(self, part: slice, subset: Subset) -> Tensor:
        """What is not yet sent of the subset: how far its parameters are from the global copy."""
        moved_n = torch.empty(subset.size, device=self.local_N.device)
        subset.gather(self.local_N[part], moved_n, self.global_N[part])
        if self.left_N is not None:
            moved_n += gathered(subset, self.left_N[part])
        return moved_n

    def apply(self, part: slice, subset: Subset, seen_n: Tensor, result_n: Tensor) -> None:
        """Add `result_n` to the global copy; parameters keep what `seen_n` lacks of their move.

        They are put together from the new global copy: where nothing lacks, they are equal to it.
        """
        if self.left_N is None:
            subset.apply_exchanged(seen_n, result_n, self.local_N[part], self.global_N[part])
            return
        left_n = self.moved(part, subset).sub_(seen_n)
        global_n = gathered(subset, self.global_N[part]).add_(result_n)
        local_n = left_n.add_(global_n)
        subset.scatter(global_n, self.global_N[part])
        rounded_n = local_n.to(self.local_N.dtype).float()
        subset.scatter(local_n - rounded_n, self.left_N[part])
        subset.scatter(rounded_n, self.local_N[part])


@contextmanager
def replaced(buckets: Sequence[FlatBucket], others: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the parameters are others."""
    saved = [bucket.local_N.clone() for bucket in buckets]
    with torch.no_grad():
        for bucket, other_N in zip(buckets, others, strict=True):
            bucket.local_N.copy_(other_N)
        try:
            yield
        finally:
            for bucket, saved_N in zip(buckets, saved, strict=True):
                bucket.local_N.copy_(saved_N)


def gathered(subset: Subset, x_N: Tensor) -> Tensor:
    """Values of the subset, in fp32."""
    out_n = torch.empty(subset.size, device=x_N.device)
    subset.gather(x_N, out_n)
    return out_n
