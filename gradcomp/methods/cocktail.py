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
step's optimizer moves the parameters. 3. is done by the training thread once everything has
arrived: a failed exchange changes nothing.

Axes: N values of a bucket, n values of a shard or of its subset.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from thinpipe.gradcomp.base import BaseSync
from thinpipe.gradcomp.buckets import device_of, make_buckets
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, Reduced, reduce_sharded
from thinpipe.gradcomp.global_copy import SharedBucket, gathered, replaced
from thinpipe.gradcomp.gradient_sync import AllReduce, GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.subset import Subset, exact_fraction, random_subset

REPLICAS_EQUAL = False
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


class Cocktail(BaseSync):
    """A `ReplicaSync` that exchanges parameters instead of gradients.

    All steps wait, also those between exchanges: exchanges are numbered by steps, so a step counts
    on all replicas or on none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers, config: Config) -> None:
        self._parameters, self._peers, self._config = tuple(parameters), peers, config
        self.overlaps = config.delayed
        nbytes = config.bucket_nbytes
        buckets = make_buckets(parameters, nbytes) if peers.size > 1 else ()
        self._buckets = [SharedBucket(bucket) for bucket in buckets]
        parts_of = [_parts(bucket.local_N, peers.size) for bucket in self._buckets]
        self._errors = [
            torch.zeros_like(bucket.local_N[parts[peers.rank]], dtype=torch.float32)
            for bucket, parts in zip(self._buckets, parts_of, strict=True)
        ]
        self._owned = [*zip(self._buckets, parts_of, self._errors, strict=True)]
        warmed_up = parameters if config.warmup_steps else ()
        self._warmup = GradientSync(warmed_up, peers, AllReduce(peers, EXACT), nbytes)
        self._overlap = Overlap(device_of(self._parameters))
        self._captured = False
        self._steps, self._exchanges = 0, 0

    def begin_step(self, step: int, passes: int) -> None:
        if not self._captured:
            self._capture()
        self._warmup.begin_step(step, passes if self._warming_up else 0)

    def before_step(self) -> None:
        self._join()  # the optimizer then moves parameters from the new global model
        if self._warming_up:
            self._warmup.before_step()
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:  # the loss was divided by the tokens of all replicas
            torch._foreach_mul_(gradients, float(self._peers.size))

    def after_step(self) -> None:
        warming_up = self._warming_up
        self._steps += 1
        if warming_up:
            self._capture()
            return
        for bucket in self._buckets:
            bucket.check_storage()
        jobs = [partial(self._exchange, *each, self._exchanges) for each in self._owned]
        self._overlap.launch_each(jobs, lambda found: (found, None))  # as checkpoints hold it
        if not self._config.delayed:
            self._join()

    def finish(self) -> None:
        self._join()

    def global_parameters(self) -> AbstractContextManager[None]:
        self._overlap.wait()
        buckets = self._buckets if self._captured else ()
        return replaced(buckets, [bucket.global_N for bucket in buckets])

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._overlap.save(),
            "steps": self._steps,
            "exchanges": self._exchanges,
            "captured": self._captured,
            "global": [bucket.global_N for bucket in self._buckets],
            "left": [bucket.left_N for bucket in self._buckets],
            "error": self._errors,
            "warmup": self._warmup.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._overlap.restore(state)
        self._steps, self._exchanges = state["steps"], state["exchanges"]
        self._captured = state["captured"]
        self._warmup.load_state_dict(state["warmup"])
        saved = zip(state["global"], state["left"], state["error"], strict=True)
        for (bucket, _, error_n), (global_N, left_N, saved_n) in zip(
            self._owned, saved, strict=True
        ):
            bucket.global_N.copy_(global_N)
            if bucket.left_N is not None:
                bucket.left_N.copy_(left_N)
            error_n.copy_(saved_n)

    @property
    def _warming_up(self) -> bool:
        return self._steps < self._config.warmup_steps

    def _capture(self) -> None:
        for bucket in self._buckets:
            bucket.capture()
        self._captured = True

    def _subsets(self, bucket: SharedBucket, parts: Sequence[slice], number: int) -> list[Subset]:
        return [
            random_subset(
                part.stop - part.start,
                fraction=self._config.subset,
                seed=_SEED,
                step=number,
                bucket=bucket.index * self._peers.size + server,
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
        subsets, size = self._subsets(bucket, parts, number), self._peers.size
        owed_n = gathered(subsets[self._peers.rank], error_n)
        reduced = reduce_sharded(
            self._peers,
            ExchangeKey(number, bucket.index, digest),
            [bucket.moved(part, M) for part, M in zip(parts, subsets, strict=True)],
            codec=self._config.codec,
            finish=lambda total_n: total_n.div_(size).add_(owed_n),
        )
        return reduced.seen, reduced.results, reduced.left_n  # as a checkpoint can hold them

    def _join(self) -> None:
        """Wait for the exchange under way and do its step 3."""
        for updates, _ in self._overlap.join():
            with torch.no_grad():
                for each, update in zip(self._owned, updates, strict=True):
                    self._apply(*each, Reduced(*update))
            self._exchanges += 1

    def _apply(
        self, bucket: SharedBucket, parts: Sequence[slice], error_n: Tensor, found: Reduced
    ) -> None:
        subsets = self._subsets(bucket, parts, self._exchanges)
        for each in zip(parts, subsets, found.seen, found.results, strict=True):
            bucket.apply(*each)
        subsets[self._peers.rank].scatter(found.left_n, error_n)


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
