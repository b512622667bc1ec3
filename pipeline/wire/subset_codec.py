"""CocktailSGD's compressor: what replicas say of a random subset of a vector, and the answer.

J. Wang et al., CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks, ICML 2023. Every
replica holds a vector x of its own and a base that all share; the server of the vector holds an
error. In the published code's order (its subset M_i is `Subset`, its k and b are `SparseCodec`'s):

    c   = Quant_b(TopK_k(x[M] - base[M]))           encode_change     at every replica
    s   = mean of all c + error[M]
    S   = Quant_b(TopK_k(s)), error[M] = s - S      encode_mean       at the server
    x[M] += S - c, base[M] += S                     settle            at every replica

What a replica could not say stays in x, as the difference to the base: there is no worker's error
to store. `encode_change` and `encode_mean` leave x, base and error alone, so that an exchange that
fails half-way has changed nothing; `settle`, which cannot fail on a link, moves x and base at once.

Axes: N values of the vector, n of them in the subset, W bytes of a message.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.wire.kernels.sparse import SparseKernels, load_sparse_kernels
from pipeline.wire.sparse import SparseCodec
from pipeline.wire.subset import RUN, Subset


class SubsetCodec:
    """Compresses changes on subsets of up to `size` values; holds buffers, so one thread at a time.

    Vectors are fp32, bf16 or fp16, contiguous and on the CPU; x in fp32 loses nothing that is not
    sent, x in bf16 loses what its rounding does.
    """

    def __init__(self, codec: SparseCodec, size: int) -> None:
        """Allocate for subsets of up to `size` values."""
        self.codec = codec
        self._value, self._seen = torch.empty(size), torch.empty(size)

    def encode_change(self, x_N: Tensor, base_N: Tensor, subset: Subset, wire: Tensor) -> int:
        """Write what x has moved from the base to `wire` (uint8); returns the message's length."""
        change_n, room_n = self._value[: subset.size], self._seen[: subset.size]
        self._kernels.gather(x_N.detach(), base_N, subset.start_R, RUN, change_n)
        return self.codec.encode(change_n, wire, room_n=room_n)

    def encode_mean(
        self,
        messages: Sequence[Tensor],
        error_N: Tensor,
        subset: Subset,
        wire: Tensor,
        left_n: Tensor,
    ) -> int:
        """Write the mean of the replicas' messages and the error to `wire`; returns the length.

        Messages are added in their order. `left_n` (fp32) receives what the answer leaves out: the
        new error, to be scattered once the exchange has succeeded.

        Raises:
            CodingError: a message is damaged.
        """
        mean_n, seen_n = self._value[: subset.size], self._seen[: subset.size]
        self.codec.decode(messages[0], mean_n)
        for message in messages[1:]:
            self.codec.decode_add(message, mean_n)
        subset.gather(error_N, left_n)
        torch.add(left_n, mean_n.div_(len(messages)), out=left_n)
        length = self.codec.encode(left_n, wire, seen_n, room_n=mean_n)
        left_n -= seen_n
        return length

    def settle(
        self, sent: Tensor, mean: Tensor, subset: Subset, x_N: Tensor, base_N: Tensor
    ) -> None:
        """Apply the server's answer to x and base; `sent` is this replica's own message.

        x ends at the new base plus what was not sent: with all values sent in fp32, at the base.

        Raises:
            CodingError: a message is damaged; nothing has changed.
        """
        sent_n, mean_n = self._value[: subset.size], self._seen[: subset.size]
        self.codec.decode(sent, sent_n)
        self.codec.decode(mean, mean_n)
        self._kernels.settle(sent_n, mean_n, subset.start_R, RUN, x_N.detach(), base_N)

    @property
    def _kernels(self) -> SparseKernels:
        return load_sparse_kernels(self.codec.backend, self._value.device)
