"""Bytes between the shards of a stage, computed beforehand: messages have a known size."""

from collections.abc import Sequence

from torch import nn

from thinpipe.gradcomp.sharded.collectives import Unit, segments
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES


def units_of(stage: nn.Module, parts: Sequence[nn.Module]) -> list[Unit]:
    """Units that a stage exchanges, each of its parts and the rest; sizes alone are right."""
    inside = [list(part.parameters()) for part in parts]
    known = {parameter for group in inside for parameter in group}
    rest = [parameter for parameter in stage.parameters() if parameter not in known]
    return [
        Unit(index, tuple(group), tuple(parameter.shape for parameter in group))
        for index, group in enumerate([*inside, rest])
    ]


def sent_nbytes(units: Sequence[Unit], config: ShardsConfig, shards: int) -> tuple[int, int]:
    """Bytes that a rank sends to other sites to gather all weights once, and scatter gradients."""
    messages = shards // config.ranks_per_site - 1  # one for each other site
    totals = []
    for weights in (True, False):
        codecs = [segments(unit, config, shards, weights=weights) for unit in units]
        payloads = [codec.capacity(sum(codec.sizes)) for codec in codecs if codec.sizes]
        totals.append(messages * sum(EXCHANGE_HEADER_NBYTES + each for each in payloads))
    return totals[0], totals[1]
