"""Messages of a microbatch: their bytes, and the seconds that their two ends compute."""

import time

import torch

from launch.build import build_boundary
from launch.config import BackwardConfig, ForwardConfig
from launch.plan.simulate import Message
from pipeline.channel import Channel
from pipeline.config import RawConfig
from pipeline.link import LoopbackLink

_REPEATS = 5


def measure_message(
    spec: ForwardConfig | BackwardConfig, shape_BTD: torch.Size, direction: int
) -> Message:
    """Send a microbatch of known samples through real channels; the least of several times.

    What memory-based and entropy-coded messages weigh depends on the values; these are Gaussian,
    with little change from visit to visit.
    """
    link, ids_B = LoopbackLink(), torch.arange(shape_BTD[0])
    sender, receiver = (
        Channel(
            cut=1,
            direction=direction,
            link=link,
            boundaries=build_boundary(spec, width=shape_BTD[-1], key=direction),
            run_id=0,
            coding="none" if isinstance(spec, RawConfig) else spec.coding,
        )
        for _ in range(2)
    )
    x_BTD = torch.randn(shape_BTD)
    encode_s, decode_s, nbytes = [], [], 0
    for number in range(_REPEATS + 1):
        for channel in (sender, receiver):
            channel.begin_pass(number, step=number, mode="train")
        receiver.expect(0, shape_BTD)
        x_BTD = x_BTD + 0.1 * torch.randn(shape_BTD)
        start_s = time.perf_counter()
        sender.send(0, x_BTD, ids_B)
        sent_s = time.perf_counter()
        receiver.receive(0, shape_BTD, ids_B)
        decode_s.append(time.perf_counter() - sent_s)
        encode_s.append(sent_s - start_s)
        nbytes = sender.take_traffic().nbytes
        for channel in (sender, receiver):
            channel.finish_step(keep=True)
    return Message(nbytes, min(encode_s[1:]), min(decode_s[1:]))
