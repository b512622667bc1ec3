"""Messages of a microbatch: their bytes, and the seconds to encode and decode them."""

import time
from collections.abc import Callable
from functools import cache

import torch

from thinpipe.aqsgd.transform.config import TransformConfig
from thinpipe.launch.components import build_boundary
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.profile import microbatch_shape
from thinpipe.launch.plan.simulate import Message
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.config import RawConfig, StatelessConfig
from thinpipe.pipeline.wire.header import DIRECTIONS, Direction

_REPEATS = 5


def describe(spec: Spec) -> str:
    """`aqsgd 4-bit`, `direct 8-bit zstd`; `direct rate 0.5` implies entropy coding."""
    if isinstance(spec, RawConfig):
        return f"{spec.kind} {spec.format}"
    if isinstance(spec, TransformConfig):
        size = f"step {spec.step:g}" if spec.error is None else f"error {spec.error:g}"
        return f"{spec.kind} {size}"
    if not isinstance(spec, StatelessConfig) and spec.rate is not None:
        return f"{spec.kind} rate {spec.rate:g}" + (" rans" if spec.coding == "rans" else "")
    return f"{spec.kind} {spec.bits}-bit" + ("" if spec.coding == "none" else f" {spec.coding}")


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

    With `known` the samples were visited before, otherwise each is new. The size of entropy-coded
    messages depends on the values; these are Gaussian and change little between visits.
    """
    sender, receiver = (
        MessageCodec(
            cut=1,
            direction=direction,
            boundaries=build_boundary(spec, width=shape_BTD[-1], key=direction),
            run_id=0,
            coding="none" if isinstance(spec, RawConfig) else spec.coding,
        )
        for _ in range(2)
    )
    x_BTD = torch.randn(shape_BTD)
    encode_s, decode_s, nbytes = [], [], 0
    for number in range(_REPEATS + 1):
        for codec in (sender, receiver):
            codec.begin_pass(step=number, mode="train")
        x_BTD = x_BTD + 0.1 * torch.randn(shape_BTD)
        ids_B = torch.arange(shape_BTD[0]) + (0 if known else number * shape_BTD[0])
        start_s = time.perf_counter()
        message = sender.encode(0, x_BTD, ids_B)
        encoded_s = time.perf_counter()
        receiver.decode(0, message, ids_B, shape_BTD)
        decode_s.append(time.perf_counter() - encoded_s)
        encode_s.append(encoded_s - start_s)
        nbytes = message.numel()
        for codec in (sender, receiver):
            codec.finish_step(keep=True)
    return Message(nbytes, min(encode_s[1:]), min(decode_s[1:]))
