"""Bits per cut: the highest fidelity whose transfer hides under compute.

All start at the fewest bits; then whichever has the least fidelity is raised by one notch, again
and again, as long as every uplink, downlink and link still carries a microbatch's messages in the
time that the slowest stage computes one. Of the choices on that way the last is taken that is
foretold to be no slower than what the run file says, and at most 5 % slower than the fastest: what
hides once the pipeline is full does not hide while it fills, nor behind a delay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.message_cost import MessageMeter, Spec
from thinpipe.launch.plan.network import Network
from thinpipe.launch.plan.predict import Blocks, Prediction, predict
from thinpipe.launch.plan.simulate import Message
from thinpipe.launch.report.metrics import DIRECTIONS, WireKey
from thinpipe.pipeline.config import DirectConfig, RawConfig, StatelessConfig

_AS_FAST = 1.05
_CASTS: tuple[Spec, ...] = (RawConfig(format="bf16"), RawConfig(format="fp32"))
_FORWARD: tuple[Spec, ...] = (
    *(AqsgdConfig(bits=4, rate=rate, coding="zstd") for rate in (0.8, 0.5)),
    *(AqsgdConfig(bits=bits) for bits in (4, 6, 8)),
    *_CASTS,
)
_FORWARD_ONCE: tuple[Spec, ...] = (*(StatelessConfig(bits=bits) for bits in (4, 5, 6, 7)), *_CASTS)
"""Where no sample is seen again: changes have no history."""
_TILES_LACK = 2
"""Bits: forward 5 with backward 4 costs less loss than 4 with 6, in fewer bytes (see "One epoch" in
benchmarks/results/aqsgd_beyond_cpu_202611.md).
"""
_BACKWARD: tuple[Spec, ...] = (
    *(DirectConfig(bits=4, rate=rate, coding="zstd") for rate in (0.7, 0.5)),
    *(DirectConfig(bits=bits) for bits in (6, 8)),
    *_CASTS,
)


class Offer(NamedTuple):
    """What could be sent, and its message."""

    spec: Spec
    message: Message


Offers = Mapping[WireKey, Sequence[Offer]]
"""By cut and direction, the least fidelity first."""


@dataclass(frozen=True)
class Recommendation:
    """What to send at every cut and direction, with its message. `hidden` is whether even that
    fits into the time of a microbatch; `slot_s` is that time.
    """

    specs: Mapping[WireKey, Spec]
    messages: Mapping[WireKey, Message]
    hidden: bool
    slot_s: float


def recommend(
    config: RunConfig, blocks: Blocks, prediction: Prediction, network: Network
) -> tuple[Recommendation, Prediction] | None:
    """Choose for every cut of `config`, with the step that follows; `prediction` is that of the
    run file. None where nothing is as fast as what the run file says.
    """
    offers = measure_offers(config)
    slot_s = max(stage.forward_s + stage.backward_s for stage in prediction.stages)
    found = [
        (choice, predict(config, blocks, choice.messages, network))
        for choice in choices(config.pipeline.cuts, offers, network, slot_s=slot_s)
    ]
    limit_s = min(prediction.step_s, _AS_FAST * min(step.step_s for _, step in found))
    return next((pair for pair in reversed(found) if pair[1].step_s <= limit_s), None)


def measure_offers(config: RunConfig) -> Offers:
    """Every rung for each cut and direction."""
    measure = MessageMeter(config)
    forward = _FORWARD if config.train.epochs > 1 else _FORWARD_ONCE
    offers: dict[WireKey, list[Offer]] = {}
    for cut in config.pipeline.cuts:
        at_cut = config.boundary_at(cut)
        down = [_like(at_cut.forward, rung) for rung in forward]
        up = [_like(at_cut.backward, rung) for rung in _BACKWARD]
        offers[cut, "forward"] = [Offer(spec, measure(spec, "forward")) for spec in down]
        offers[cut, "backward"] = [Offer(spec, measure(spec, "backward")) for spec in up]
    return offers


def _like(configured: Spec, rung: Spec) -> Spec:
    """The rung, with the run file's other settings of a codec of that kind.

    Changes go in plain groups: tiles do not have every rung.
    """
    if configured.kind != rung.kind:
        return rung
    kept = configured.model_dump(exclude={"bits", "format", "rate", "delta"})
    return type(rung).model_validate(kept | rung.model_dump(exclude_unset=True))


def choices(
    cuts: Sequence[int], offers: Offers, network: Network, *, slot_s: float
) -> list[Recommendation]:
    """Raise fidelities as far as the links carry them in `slot_s`, one microbatch's compute."""
    payload = network.payload()
    fallbacks = {(cut, direction): 0 for cut in cuts for direction in DIRECTIONS}

    def fits(trial: Mapping[WireKey, int]) -> bool:
        nbytes = {key: offers[key][rung].message.nbytes for key, rung in trial.items()}
        return _busiest_s(cuts, nbytes, payload) <= slot_s

    hidden, path = fits(fallbacks), [fallbacks]
    open_keys = set(fallbacks) if hidden else set()
    while open_keys:
        key = min(open_keys, key=lambda k: (_bits(offers[k][fallbacks[k]].spec), k[1], k[0]))
        raised = {**fallbacks, key: fallbacks[key] + 1}
        if raised[key] < len(offers[key]) and fits(raised):
            fallbacks = raised
            path.append(fallbacks)
        else:
            open_keys.discard(key)
    return [
        Recommendation(
            {key: offers[key][rung].spec for key, rung in chosen.items()},
            {key: offers[key][rung].message for key, rung in chosen.items()},
            hidden,
            slot_s,
        )
        for chosen in path
    ]


def _busiest_s(cuts: Sequence[int], nbytes: Mapping[WireKey, int], payload: Network) -> float:
    """Seconds per microbatch of the busiest uplink, link or downlink."""
    up = [0] * payload.hosts
    down = [0] * payload.hosts
    links_s = [0.0]
    for stage, cut in enumerate(cuts):
        for source, target, size in (
            (stage, stage + 1, nbytes[cut, "forward"]),
            (stage + 1, stage, nbytes[cut, "backward"]),
        ):
            up[source] += size
            down[target] += size
            links_s.append(payload.link_s(source, target, size))
    uplinks_s = [payload.uplink_s(host, size) for host, size in enumerate(up)]
    downlinks_s = [payload.downlink_s(host, size) for host, size in enumerate(down)]
    return max(uplinks_s + downlinks_s + links_s)


def _bits(spec: Spec) -> float:
    """A measure of fidelity: bits per value, of an entropy coder those it leaves.

    Tiles count for less, as whole activations need more bits than gradients.
    """
    if isinstance(spec, RawConfig):
        return 32 if spec.format == "fp32" else 16
    if isinstance(spec, StatelessConfig):
        return spec.bits - _TILES_LACK
    return spec.bits if spec.rate is None else math.log2(4 / spec.rate)
