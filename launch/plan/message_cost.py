"""Messages of a microbatch: their bytes, and the seconds that their two ends compute."""

import time

import torch

from thinpipe.launch.components import build_boundary
from thinpipe.launch.config.run import BackwardConfig, ForwardConfig, RunConfig
from thinpipe.launch.plan.profile import microbatch_shape
from thinpipe.launch.plan.simulate import Message
from thinpipe.launch.report.metrics import DIRECTIONS, Direction
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.config import RawConfig, StatelessConfig

Spec = ForwardConfig | BackwardConfig

_REPEATS = 5


def describe(spec: Spec) -> str:
    """`aqsgd 4-bit`, `direct 8-bit zstd`; a rate, as in `direct rate 0.5`, is always coded."""
    if isinstance(spec, RawConfig):
        return f"{spec.kind} {spec.format}"
    if not isinstance(spec, StatelessConfig) and spec.rate is not None:
        return f"{spec.kind} rate {spec.rate:g}"
    return f"{spec.kind} {spec.bits}-bit" + ("" if spec.coding == "none" else f" {spec.coding}")


class MessageMeter:
    """Messages of a run's microbatches; settings that are the same are measured once.

    In a run of one epoch every visit of a sample is the first.
    """

    def __init__(self, config: RunConfig) -> None:
        self._shape_BTD, self._known = microbatch_shape(config), config.train.epochs > 1
        self._measured: dict[str, Message] = {}

    def __call__(self, spec: Spec, direction: Direction) -> Message:
        """The message that a boundary of this setting sends."""
        key = f"{direction} {spec!r}"
        if key not in self._measured:
            self._measured[key] = measure_message(
                spec, self._shape_BTD, DIRECTIONS.index(direction), known=self._known
            )
        return self._measured[key]


def measure_message(
    spec: Spec, shape_BTD: torch.Size, direction: int, *, known: bool = True
) -> Message:
    """Send a microbatch through real channels, of `known` samples or of new ones each time; the
    least of several times.

    What memory-based and entropy-coded messages weigh depends on the values; these are Gaussian,
    with little change from visit to visit.
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
