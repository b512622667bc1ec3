"""Compression of cuts and exchange, from the fewest bytes to the most faithful.

A layout is found for the fewest bytes. Then, as in `launch/plan/bits.py`, fidelity is raised as far
as the predicted step gets at most 5 % longer: first that of the exchange between replicas, which
costs more loss at the same bytes (`benchmarks/results/replicas_gpt2_cpu_202611.md`), then that of
the cuts, always the direction that has least.

All-reduce may become `ef_gradients`, delayed, which keeps its learning rate and overlaps with the
whole step, and sends a larger part where there is time; but only in runs like those in which it
ended as low as all-reduce (`launch/plan/losses.json`). Other methods were chosen for more than
their bytes, like codecs that no list has: they stay.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import message_meter
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.memory.exchange import ExchangeCost
from thinpipe.launch.plan.bits import AS_FAST, Candidate, Levels, levels, raise_levels
from thinpipe.launch.plan.losses import GOAL, measured
from thinpipe.launch.plan.placement.workload import count_exchange
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

_SPARSE = "ef_gradients"
_FRACTIONS = (0.015, 0.06, 0.25)
"""Of a message: its default, then four times as much each."""
_REPLACEABLE = {"forward": {"aqsgd", "direct", "raw", "stateless"}}
_REPLACEABLE["backward"] = {"direct", "raw", "stateless"}


@dataclass(frozen=True)
class Settings:
    """Levels in their lists: of every cut, forward and backward, and of the exchange."""

    cuts: Levels
    exchange: int = 0


class CompressionLevels:
    """Alternatives to a run file's compression; costs are measured once."""

    def __init__(self, config: RunConfig) -> None:
        cuts = config.pipeline.cuts
        boundary, measure = config.boundary_at(cuts[0] if cuts else 1), message_meter(config)
        self.cuts: dict[Direction, list[Candidate]] = {}
        for way in DIRECTIONS:
            own = getattr(boundary, way)
            specs = levels(config, own, way) if own.kind in _REPLACEABLE[way] else [own]
            self.cuts[way] = [Candidate(spec, measure(spec, way)) for spec in specs]
        self.exchanges = exchanges(config)
        self._costs: dict[tuple[int, int, bool], ExchangeCost | None] = {}

    def at(self, settings: Settings) -> dict[WireKey, Candidate]:
        return {key: self.cuts[key[1]][level] for key, level in settings.cuts.items()}

    def exchange(self, variant: RunConfig, level: int) -> ExchangeCost | None:
        """Cost of a variant's exchange; None where the run cannot have that method."""
        pipeline = variant.pipeline
        key = level, pipeline.replicas, pipeline.stages > 1
        if key not in self._costs:
            self._costs[key] = None
            with suppress(ValueError):
                self._costs[key] = count_exchange(variant.updated(gradcomp=self.exchanges[level]))
        return self._costs[key]


def exchanges(config: RunConfig) -> list[dict[str, Any]]:
    """`[gradcomp]` sections, the fewest bytes first."""
    method = config.method
    own = {"method": method, method: config.gradcomp.get(method, {})}
    if method != "allreduce":
        return [own]
    losses = [tried.loss(config) for tried in measured() if tried.method == _SPARSE]
    sparse = []
    if losses and all(loss is not None and loss <= GOAL for loss in losses):
        sparse = [_section(_SPARSE, delayed=True, fraction=fraction) for fraction in _FRACTIONS]
    is_exact = getattr(config.method_options, "format", "fp32") == "fp32"
    bf16, fp32 = (_section("allreduce", format=number) for number in ("bf16", "fp32"))
    return [*sparse, *([bf16, own] if is_exact else [own, fp32])]


def _section(method: str, **options: Any) -> dict[str, Any]:
    return {"method": method, method: options}


def raised(
    step_s: Callable[[Settings], float], start: Settings, levels: CompressionLevels
) -> Settings:
    """Raise fidelity as far as the step is at most 5 % longer than `start`'s.

    `step_s` is infinite for settings that a layout cannot have.
    """
    limit_s = AS_FAST * step_s(start)
    higher = range(len(levels.exchanges) - 1, start.exchange, -1)
    trials = (replace(start, exchange=level) for level in higher)
    settings = next((trial for trial in trials if step_s(trial) <= limit_s), start)
    path = raise_levels(
        start.cuts,
        {key: levels.cuts[key[1]] for key in start.cuts},
        lambda cuts: step_s(replace(settings, cuts=cuts)) <= limit_s,
        order=lambda key: (key[0], DIRECTIONS.index(key[1])),
    )
    return replace(settings, cuts=path[-1])
