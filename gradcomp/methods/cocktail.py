"""CocktailSGD: random subset, top-k and quantization together, both ways, during compute.

Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML 2023,
Algorithm 1, in the form of the authors' code: replicas train by themselves and exchange how far
their parameters have moved.

    x   `SharedBucket.local_N`    this replica's parameters, moved by its own optimizer
    g   `SharedBucket.global_N`   the global model, equal on all replicas bit for bit
    r   `SharedBucket.moved`      moves that the others have not heard of
    e   `_errors`                 what the server of a shard still owes the global model
    M   `Subset`                  coordinates whose turn it is, the same on all replicas

    1.  c_w = C(r_w[M])                   every replica w, to the server of each shard
    2.  S = C(mean_w c_w + e[M])          the server, to all;   e[M] = its argument - S
    3.  r_w[M] -= c_w;  g[M] += S         what C left out of step 1 is sent later

So g + mean(r) + e moves by the mean of the local updates, exactly. With `delayed` the exchange that
follows optimizer step t runs during forward and backward of step t + 1, and 3. is done before that
step's optimizer moves the parameters. 3. is done by the training thread once step t + 1 counts: a
failed exchange changes nothing, and is made again with that step by those who are left.

Axes: N values of a bucket, n values of a shard or of its subset.
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from thinpipe.gradcomp.base import Hold, WithinSteps
from thinpipe.gradcomp.buckets import device_of, make_buckets
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, Reduced, reduce_sharded
from thinpipe.gradcomp.global_copy import SharedBucket, gathered, replaced
from thinpipe.gradcomp.gradient_sync import AllReduce, GradientSync
from thinpipe.gradcomp.late import LateExchange
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.subset import Subset, exact_fraction, random_subset

REPLICAS_EQUAL = False
GOES_ON = {"delayed": True}  # else its exchange is no part of a step
_SEED = 0  # of subsets: the same on all replicas


class Config(ExchangeOptions, populate_by_name=True):
    """`subset` of the parameters take turns, the largest `topk` of them are sent, `bits` each.

    The names of the authors' environment variables are accepted too. The first `warmup_steps`
    steps average gradients exactly instead.
    """

    subset: float = Field(0.1, gt=0, le=1, validation_alias=AliasChoices("subset", "RANDOMP_RATIO"))
    topk: float = Field(0.2, gt=0, le=1, validation_alias=AliasChoices("topk", "TOPK_RATIO"))
    bits: int = Field(4, validation_alias=AliasChoices("bits", "QUANT_BITS"))

    delayed: bool = True
    warmup_steps: int = Field(0, ge=0)

    @property
    def copied_nbytes(self) -> int:
        return int(self.subset * self.bucket_nbytes)

    @property
    def codec(self) -> SparseCodec:
        return SparseCodec(self.topk, self.bits, self.group)

    @model_validator(mode="after")
    def _has_a_subset(self) -> "Config":
        exact_fraction(self.subset)
        return self


class Cocktail(WithinSteps):
    """A `ReplicaSync` that exchanges parameters instead of gradients.

    All steps wait, also those between exchanges: exchanges are numbered by steps, so a step counts
    on all replicas or on none.
    """

    sends_ahead = False

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers, config: Config) -> None:
        self._parameters, self._peers, self._config = tuple(parameters), peers, config
        self.overlaps = config.delayed
        self._buckets = list[SharedBucket]()
        self._share_out()
        warmed_up = parameters if config.warmup_steps else ()
        averages = AllReduce(peers, EXACT)
        self._warmup = GradientSync(warmed_up, peers, averages, config.bucket_nbytes)
        self._overlap = Overlap(device_of(self._parameters))
        self._captured = False
        self._steps, self._exchanges = 0, 0
        self._late = LateExchange(self._overlap, self._launch)

    def begin_step(self, step: int, passes: int) -> None:
        if not self._captured:
            self._capture()
        self._late.begin()
        self._warmup.begin_step(step, passes if self._warming_up else 0)

    def before_step(self) -> None:
        self._late.wait()
        if self._warming_up:
            self._warmup.before_step()
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:  # the loss was divided by the tokens of all replicas
            torch._foreach_mul_(gradients, float(self._peers.size))

    def commit(self) -> None:
        """Do step 3 of what has arrived; the optimizer moves parameters from there."""
        for updates in self._late.take():
            with torch.no_grad():
                for each, update in zip(self._owned, updates, strict=True):
                    self._apply(*each, Reduced(*update))
            self._exchanges += 1

    def after_step(self) -> None:
        warming_up = self._warming_up
        self._steps += 1
        if warming_up:
            self._capture()
            return
        for bucket in self._buckets:
            bucket.check_storage()
        self._late.pending = True
        if not self._config.delayed:
            self.finish()

    def finish(self) -> None:
        self.finish_by(operator.call)

    def finish_by(self, hold: Hold) -> None:
        if self._late.pending:
            hold(self._late.wait)
            self.commit()

    def settle(self) -> None:
        super().settle()
        self._warmup.settle()

    def abandon(self) -> None:
        self._late.abandon()
        self._warmup.abandon()

    def regroup(self, rank: int, size: int) -> None:
        """Shards change: what their servers owe is dropped, as others serve them now."""
        self.commit()  # an exchange that others have had counted
        self.abandon()
        self._warmup.regroup(rank, size)
        if (self._rank, self._size) != (self._peers.rank, self._peers.size):
            self._share_out()

    def shared_state(self) -> dict[str, Any]:
        """Who joins has this replica's parameters, and so owes what it does, but its servers'."""
        return {**self.state_dict(), "error": []}

    def alike(self) -> list[Tensor]:
        return [bucket.global_N for bucket in self._buckets]

    def global_parameters(self) -> AbstractContextManager[None]:
        buckets = self._buckets if self._captured else ()
        return replaced(buckets, [bucket.global_N for bucket in buckets])

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "exchanges": self._exchanges,
            "pending": self._late.pending,
            "captured": self._captured,
            "global": [bucket.global_N for bucket in self._buckets],
            "left": [bucket.left_N for bucket in self._buckets],
            "error": self._errors,
            "warmup": self._warmup.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._exchanges = state["steps"], state["exchanges"]
        # of before "pending", a checkpoint holds what an exchange found: it finds that again
        pending = state["pending"] if "pending" in state else bool(state["under_way"])
        self._late.pending = pending or None
        self._captured = state["captured"]
        self._warmup.load_state_dict(state["warmup"])
        if state["global"] and not self._buckets:  # there were more replicas
            self._share_out(alone=True)
        for bucket, global_N in zip(self._buckets, state["global"], strict=True):
            bucket.global_N.copy_(global_N)
        for bucket, left_N in zip(self._buckets, state["left"], strict=True):
            if bucket.left_N is not None:
                bucket.left_N.copy_(left_N)
        for own_n, error_n in zip(self._errors, state["error"], strict=False):
            own_n.copy_(error_n)

    @property
    def _warming_up(self) -> bool:
        return self._steps < self._config.warmup_steps

    def _share_out(self, *, alone: bool = False) -> None:
        """Have each replica serve a shard, and owe nothing; `alone`: also of one replica."""
        self._rank, self._size = self._peers.rank, self._peers.size
        if not self._buckets and (alone or self._size > 1):
            made = make_buckets(self._parameters, self._config.bucket_nbytes)
            self._buckets = [SharedBucket(bucket) for bucket in made]
        parts_of = [_parts(bucket.local_N, self._size) for bucket in self._buckets]
        self._errors = [
            torch.zeros_like(bucket.local_N[parts[self._rank]], dtype=torch.float32)
            for bucket, parts in zip(self._buckets, parts_of, strict=True)
        ]
        self._owned = [*zip(self._buckets, parts_of, self._errors, strict=True)]

    def _capture(self) -> None:
        for bucket in self._buckets:
            bucket.capture()
        self._captured = True

    def _launch(self, _pending: Any) -> None:
        jobs = [partial(self._exchange, *each, self._exchanges) for each in self._owned]
        self._overlap.launch_each(jobs)

    def _subsets(self, bucket: SharedBucket, parts: Sequence[slice], number: int) -> list[Subset]:
        return [
            random_subset(
                part.stop - part.start,
                fraction=self._config.subset,
                seed=_SEED,
                step=number,
                bucket=bucket.index * self._size + server,
            )
            for server, part in enumerate(parts)
        ]

    def _exchange(
        self, bucket: SharedBucket, parts: Sequence[slice], error_n: Tensor, number: int
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Steps 1 and 2 of a bucket, on a communication thread; changes nothing."""
        # Replicas that did not start from one model are noticed in the first exchange. After a
        # warm-up they are equal to rounding only, if optimizers run on unlike processors.
        digest = bucket.digest() if number == 0 and not self._config.warmup_steps else 0
        subsets, size = self._subsets(bucket, parts, number), self._size
        owed_n = gathered(subsets[self._rank], error_n)
        reduced = reduce_sharded(
            self._peers,
            ExchangeKey(number, bucket.index, digest),
            [bucket.moved(part, M) for part, M in zip(parts, subsets, strict=True)],
            codec=self._config.codec,
            finish=lambda total_n: total_n.div_(size).add_(owed_n),
        )
        return reduced.seen, reduced.results, reduced.left_n  # in which `Overlap` sees tensors

    def _apply(
        self, bucket: SharedBucket, parts: Sequence[slice], error_n: Tensor, found: Reduced
    ) -> None:
        subsets = self._subsets(bucket, parts, self._exchanges)
        for each in zip(parts, subsets, found.seen, found.results, strict=True):
            bucket.apply(*each)
        subsets[self._rank].scatter(found.left_n, error_n)


def _parts(local_N: Tensor, size: int) -> list[slice]:
    lengths = [len(part_n) for part_n in local_N.tensor_split(size)]
    return [slice(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> Cocktail:
    """Raises ValueError if parameters are in fp16, in which small moves would be lost."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ValueError(
            'gradcomp.method = "cocktail": the model has parameters in fp16; use fp32 or bf16'
        )
    return Cocktail(parameters, peers, config)
