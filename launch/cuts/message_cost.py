"""Messages of a microbatch: their bytes, and the seconds to encode and decode them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from torch import Tensor

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.memory.microbatches import microbatch_shape
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

_REPEATS = 5  # and a first one, which loads kernels; the quickest counts
_CHANGE = 0.1  # relative change of a value between two visits
_TOKENS = 8  # tokens per channel that a basis is found from
_DECAY = (1.1, 1.2)
"""Powers by which energy falls from direction to direction, forward and backward. With these a
transform takes the bits that it was measured to take at GPT-2's shape
(benchmarks/results/transform_cpu_202611.md)."""


@dataclass(frozen=True)
class Message:
    """A microbatch's message in one direction of a cut: its size, and the seconds of its codec."""

    nbytes: int
    encode_s: float = 0.0
    decode_s: float = 0.0

    def of_microbatches(self, share: float) -> "Message":
        return Message(ceil(share * self.nbytes), share * self.encode_s, share * self.decode_s)


def measure_messages(config: RunConfig) -> dict[WireKey, Message]:
    """Messages of every cut and direction."""
    measure = message_meter(config)
    return {key: measure(spec, key[1]) for key, spec in config.specs.items()}


def message_meter(config: RunConfig) -> Callable[[Spec, Direction], Message]:
    """Measures messages of a run's microbatches; each setting once.

    In a run of one epoch every visit of a sample is its first.
    """
    shape_BTD, known = microbatch_shape(config), config.train.epochs > 1

    @cache
    def measure(spec: Spec, direction: Direction) -> Message:
        return measure_message(spec, shape_BTD, DIRECTIONS.index(direction), known=known)

    return measure


def measure_message(
    spec: Spec, shape_BTD: torch.Size, direction: int, *, known: bool = True
) -> Message:
    """Send a microbatch through real channels several times; return the least times.

    With `known` the samples were visited before, otherwise each is new. The size of a learned
    transform's messages depends on the values. These are Gaussian, change little between visits and
    fill few dimensions, and its basis is settled.
    """
    width, random = shape_BTD[-1], torch.Generator()
    random.manual_seed(0)  # a plan is the same each time; bits vary by 12 %

    def made_up(*shape: int) -> Tensor:
        white = torch.randn(shape, generator=random)
        return white @ mixing(width, direction) if spec.learns else white

    boundaries = [spec.build(width=width, key=direction) for _ in range(2)]
    codecs = [
        MessageCodec(cut=1, direction=direction, boundaries=own, run_id=0) for own in boundaries
    ]
    sender, receiver = codecs
    x_BTD = made_up(*shape_BTD)
    if spec.learns:
        value_ND, other_ND = (made_up(_TOKENS * width, width) for _ in range(2))
        sent_ND = _CHANGE * other_ND if known else value_ND
        spec.settle([codec.training for codec in codecs], sent_ND, value_ND, known=known)
    encode_s, decode_s, nbytes = [], [], []
    for number in range(_REPEATS + 1):
        for codec in codecs:
            codec.begin_pass(step=number, mode="train")
        x_BTD = x_BTD + _CHANGE * made_up(*shape_BTD)
        ids_B = torch.arange(shape_BTD[0]) + (0 if known else number * shape_BTD[0])
        start_s = time.perf_counter()
        message = sender.encode(0, x_BTD, ids_B)
        encoded_s = time.perf_counter()
        receiver.decode(0, message, ids_B, shape_BTD)
        decode_s.append(time.perf_counter() - encoded_s)
        encode_s.append(encoded_s - start_s)
        nbytes.append(message.numel())
        for codec in codecs:
            codec.training.finish_step(keep=True)
    # steps that follow changes swing from visit to visit
    return Message(round(sum(nbytes[-2:]) / 2), min(encode_s[1:]), min(decode_s[1:]))


@cache
def mixing(width: int, direction: int) -> Tensor:
    """[D, D], which makes white tokens into such as cross a cut, with a mean square of 1."""
    generator = torch.Generator().manual_seed(0)
    turn_DD = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    energy_D = torch.arange(1, width + 1) ** -_DECAY[direction]
    mixing_DD: Tensor = (energy_D / energy_D.mean()).sqrt()[:, None] * turn_DD
    return mixing_DD
