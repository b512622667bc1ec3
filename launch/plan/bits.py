"""Bits per cut: the highest fidelity whose transfer overlaps with compute.

All directions start at the fewest bits; then the one with the least fidelity is raised one level,
repeatedly, as long as every uplink, downlink and link carries a microbatch's messages in the time
that the slowest stage computes one. Of the allocations on that path the last one is taken whose
predicted step is no longer than with the run file's own settings, and at most 5 % longer than the
shortest: what overlaps once the pipeline is full does not while it fills, nor behind a delay.

For a model that was trained before there is a second list, of learned transforms in both
directions, which send less for the same loss and compute more
(benchmarks/results/transform_cpu_202611.md): of the settings of both that are fast enough, those of
most fidelity are taken.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.aqsgd.transform.config import GradientTransformConfig, TransformConfig
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message, message_meter
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.plan.predict import Prediction, predict
from thinpipe.pipeline.config import DirectConfig, RawConfig, StatelessConfig
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

AS_FAST = 1.05
"""More bits may make a step this many times as long as the shortest."""
_CASTS: tuple[Spec, ...] = (RawConfig(format="bf16"), RawConfig(format="fp32"))
_FORWARD: tuple[Spec, ...] = (*(AqsgdConfig(bits=bits) for bits in (2, 3, 4, 6, 8)), *_CASTS)
"""In tiles. With gradients in tiles of 4 bits, 2 bits end .0185 nats above uncompressed cuts; with
gradients of 6 bits, 3 bits .0027 (benchmarks/results/aqsgd_beyond_cpu_202611.md).
"""
_FORWARD_TRAINED: tuple[Spec, ...] = _FORWARD[1:]
"""For models that were trained before, where changes in 2 bits are predicted to lose four times as
much as in 3 (benchmarks/results/pretrained_cpu_202611.md).
"""
_FORWARD_ONCE: tuple[Spec, ...] = (*(StatelessConfig(bits=bits) for bits in (4, 5, 6, 7)), *_CASTS)
"""In a single epoch, where no sample has a previous activation to send the change of."""
_BACKWARD: tuple[Spec, ...] = (
    *(StatelessConfig(bits=bits) for bits in (3, 4)),
    *(DirectConfig(bits=bits) for bits in (6, 8)),
    *_CASTS,
)
"""Below 6 bits in tiles: 3 bits each way lose .0127, less than 2 and 4 in as many bytes."""
_STEPS = (1.0, 0.8, 0.6, 0.4, 0.3)  # lose .014 to .0014 nats (results/transform_cpu_202611.md)
_LEARNED: Mapping[Direction, tuple[Spec, ...]] = {
    "forward": (*(TransformConfig(step=step) for step in _STEPS), *_FORWARD[2:]),
    "backward": (*(GradientTransformConfig(step=step) for step in _STEPS), *_BACKWARD[2:]),
}
"""A step of 0.6 loses a quarter of what tiles of 2 and 4 bits do, in fewer bytes."""
_LEARNED_ONCE: Mapping[Direction, tuple[Spec, ...]] = {
    "forward": (
        *(TransformConfig(memory=False, first_step=step) for step in (0.1, 0.05)),
        *_FORWARD_ONCE[-3:],
    ),
    "backward": (
        *(GradientTransformConfig(memory=False, first_step=step) for step in (0.5, 0.15)),
        *_BACKWARD[2:],
    ),
}
_OF_LEVELS = {"bits", "format", "delta", "step", "first_step", "largest_step"}


class Candidate(NamedTuple):
    """A possible setting of one direction, and its message."""

    spec: Spec
    message: Message


Candidates = Mapping[WireKey, Sequence[Candidate]]
"""By cut and direction, the least fidelity first."""
Levels = Mapping[WireKey, int]
"""How far up its list of candidates each cut and direction is."""


@dataclass(frozen=True)
class Recommendation:
    """A setting for every cut and direction, with its message. `overlaps` is whether the transfers
    fit into the compute time of a microbatch.
    """

    specs: Mapping[WireKey, Spec]
    messages: Mapping[WireKey, Message]
    overlaps: bool


def recommend(
    config: RunConfig, blocks: Blocks, prediction: Prediction, network: Network
) -> tuple[Recommendation, Prediction] | None:
    """A recommendation for `config` with its predicted step; `prediction` is that of the run file.
    None if nothing is as fast as the run file's own settings with more bits, or clearly faster.
    """
    work, slot_s = prediction.work, prediction.slot_s
    lists = [measure_candidates(config)]
    if config.pretrained:
        lists.append(measure_candidates(config, learned=True))
    found = [
        (advice, predict(config, blocks, advice.messages, network))
        for candidates in lists
        for advice in allocate_bits(
            config.pipeline.cuts, candidates, network, slot_s=slot_s, ranks=work.position_of
        )
    ]
    limit_s = min(prediction.step_s, AS_FAST * min(step.step_s for _, step in found))
    fast = [pair for pair in found if pair[1].step_s <= limit_s]
    best = max(
        fast,
        key=lambda pair: sum(spec.fidelity(way) for (_, way), spec in pair[0].specs.items()),
        default=None,
    )
    return best if best is not None and _is_better(*best, prediction) else None


def _is_better(advice: Recommendation, step: Prediction, own: Prediction) -> bool:
    """More bits in no more time, or a step shorter by more than measurements differ."""
    nbytes = sum(message.nbytes for message in advice.messages.values())
    richer = nbytes > sum(message.nbytes for message in own.messages.values())
    return richer or AS_FAST * step.step_s <= own.step_s


def measure_candidates(config: RunConfig, *, learned: bool = False) -> Candidates:
    """Every level of fidelity for each cut and direction."""
    measure = message_meter(config)
    return {
        key: [
            Candidate(level, measure(level, key[1]))
            for level in levels(config, spec, key[1], learned=learned)
        ]
        for key, spec in config.specs.items()
    }


def levels(
    config: RunConfig, configured: Spec, direction: Direction, *, learned: bool = False
) -> list[Spec]:
    """Alternatives to the run file's setting of a direction, the least fidelity first."""
    if learned:
        own = (_LEARNED if config.train.epochs > 1 else _LEARNED_ONCE)[direction]
    elif direction == "forward":
        again = _FORWARD_TRAINED if config.pretrained else _FORWARD
        own = again if config.train.epochs > 1 else _FORWARD_ONCE
    else:
        own = _BACKWARD
    return [_like(configured, level) for level in own]


def _like(configured: Spec, level: Spec) -> Spec:
    """The level, with the run file's other settings of a codec of that kind.

    `delta` and `largest_step` are left at their defaults: they do not go with every level.
    """
    if configured.kind != level.kind:
        return level
    kept = configured.model_dump(exclude=_OF_LEVELS)
    return type(level).model_validate(kept | level.model_dump(exclude_unset=True))


def allocate_bits(
    cuts: Sequence[int],
    candidates: Candidates,
    network: Network,
    *,
    slot_s: float,
    ranks: Sequence[int] | None = None,
) -> list[Recommendation]:
    """Raise fidelities while links carry a microbatch within `slot_s`; return the whole path.

    `ranks` holds the rank of each stage, by default one for each.
    """
    payload, ranks = network.payload(), ranks or range(len(cuts) + 1)
    start: Levels = {(cut, direction): 0 for cut in cuts for direction in DIRECTIONS}

    def fits(trial: Levels) -> bool:
        nbytes = {key: candidates[key][level].message.nbytes for key, level in trial.items()}
        return _busiest_s(cuts, ranks, nbytes, payload) <= slot_s

    overlaps, path = fits(start), [start]
    if overlaps:
        path = raise_levels(start, candidates, fits, order=lambda key: (key[1], key[0]))
    return [
        Recommendation(
            {key: candidates[key][level].spec for key, level in chosen.items()},
            {key: candidates[key][level].message for key, level in chosen.items()},
            overlaps,
        )
        for chosen in path
    ]


def raise_levels(
    start: Levels,
    candidates: Candidates,
    fits: Callable[[Levels], bool],
    *,
    order: Callable[[WireKey], tuple[str | int, ...]],
) -> list[Levels]:
    """Raise the one of least fidelity by a level, as long as one can be raised; the whole path.

    Of equal ones, the first in this order.
    """
    path, left = [start], set(start)

    def reached(key: WireKey) -> tuple[float, tuple[str | int, ...]]:
        return candidates[key][path[-1][key]].spec.fidelity(key[1]), order(key)

    while left:
        key = min(left, key=reached)
        raised = {**path[-1], key: path[-1][key] + 1}
        if raised[key] < len(candidates[key]) and fits(raised):
            path.append(raised)
        else:
            left.discard(key)
    return path


def _busiest_s(
    cuts: Sequence[int], ranks: Sequence[int], nbytes: Mapping[WireKey, int], payload: Network
) -> float:
    """Seconds per microbatch of the busiest uplink, link or downlink."""
    up, down, seconds = Counter[int](), Counter[int](), [0.0]
    for cut, (above, below) in zip(cuts, pairwise(ranks), strict=True):
        for source, target, size in (
            (above, below, nbytes[cut, "forward"]),
            (below, above, nbytes[cut, "backward"]),
        ):
            if source != target:
                up[source] += size
                down[target] += size
                seconds.append(payload.link_s(source, target, size))
    seconds += [payload.uplink_s(host, size) for host, size in up.items()]
    return max(seconds + [payload.downlink_s(host, size) for host, size in down.items()])
