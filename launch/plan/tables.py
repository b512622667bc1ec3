"""A plan as tables for the terminal."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thinpipe.gradcomp.sharded.collectives import sent_nbytes, units_of
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.links import format_rate
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey, format_bytes, format_duration
from thinpipe.launch.memory.microbatches import microbatch_count, samples_at_once
from thinpipe.launch.plan.bits import Recommendation
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.launch.plan.predict import Prediction


def show_plan(
    console: Console,
    config: RunConfig,
    prediction: Prediction,
    network: Network,
    memory: Sequence[int],
) -> None:
    """Stages, cuts and the step; `memory` is what each rank needs, in bytes."""
    work = prediction.work
    console.print(_stages(config, work, memory))
    if config.pipeline.cuts:
        sent = config.specs, prediction.messages
        console.print(_cuts("messages at each cut", *sent, network, work))
    console.print(
        f"predicted step {format_duration(prediction.step_s)}, bubble {prediction.bubble:.0%}; "
        f"{format_duration(prediction.unlimited_s)} with unlimited links"
    )
    threads = torch.get_num_threads()
    what = "stage" if config.pipeline.shards == 1 else "shard of a stage"
    notes = [f"each {what} on its own machine with {threads} thread{'s' * (threads != 1)}"]
    wanted, count = config.pipeline.microbatches, microbatch_count(config)
    if count != wanted:
        notes.append(
            f"{count} microbatches, not {wanted}: a replica has {samples_at_once(config)} samples "
            "per pass"
        )
    if network.highest_latency_s:
        latency = format_duration(network.highest_latency_s)
        notes.append(f"the highest latency between two ranks is {latency}, on top of transfers")
    if network.highest_latency_s > 0.005:
        notes.append(
            "this assumes net.ipv4.tcp_slow_start_after_idle = 0 on every host; with 1 each pause "
            "costs round trips"
        )
    if config.pipeline.replicas > 1:
        notes.append("the exchange between replicas is not included")
    if config.pipeline.shards > 1:
        notes.append(_between_shards(config))
    for note in notes:
        console.print(f"note: {note}")


def _between_shards(config: RunConfig) -> str:
    traffic = []
    for first, stop in pairwise((0, *config.pipeline.cuts, config.model.layers)):
        stage: Any = config.model.build(first, stop, seed=0, device="meta")  # not a custom one
        units = units_of(stage, stage.parts())
        traffic.append(sent_nbytes(units, config.shards, config.pipeline.shards))
    weights, gradients = max(traffic)
    if config.shards.gather == "microbatch":  # for forward and backward of each
        passes = config.train.accumulate * microbatch_count(config)
        weights, gradients = 2 * passes * weights, passes * gradients
    return (
        f"of {config.pipeline.shards} shards of a stage, each sends up to {format_bytes(weights)} "
        f"of weights and {format_bytes(gradients)} of gradients per step, which is not included"
    )


def show_recommendation(
    console: Console, advice: Recommendation, prediction: Prediction, network: Network
) -> None:
    """The recommended settings, and the predicted step with them."""
    sent = advice.specs, advice.messages
    console.print(_cuts("recommended", *sent, network, prediction.work))
    if not advice.overlaps:
        console.print(
            "even with the fewest bits, transfers take longer than the "
            f"{format_duration(prediction.slot_s)} of compute per microbatch: use fewer stages, "
            "larger microbatches, wider models or faster links"
        )
    console.print(
        f"predicted step {format_duration(prediction.step_s)}, bubble {prediction.bubble:.0%}"
    )


def _stages(config: RunConfig, work: Workload, memory: Sequence[int]) -> Table:
    table = Table(title="per microbatch; memory of the whole rank", title_justify="left")
    for head in ("stage", "rank", "blocks", "forward", "backward", "memory"):
        table.add_column(head, justify="left" if head in ("stage", "blocks") else "right")
    bounds = pairwise((0, *config.pipeline.cuts, config.model.layers))
    for stage, (first, stop) in enumerate(bounds):
        rank = work.position_of[stage]
        table.add_row(
            str(stage),
            str(rank),
            f"{first}-{stop - 1}",
            f"{work.forward_s[stage] * 1e3:.3g} ms",
            f"{work.backward_s[stage] * 1e3:.3g} ms",
            format_bytes(memory[rank]),
        )
    return table


def _cuts(
    title: str,
    specs: Mapping[WireKey, Spec],
    messages: Mapping[WireKey, Message],
    network: Network,
    work: Workload,
) -> Table:
    table = Table(title=title, title_justify="left")
    for head in ("cut", "direction", "method", "bytes", "transfer", "codec", "link"):
        table.add_column(head, justify="left" if head in ("direction", "method") else "right")
    payload, cuts = network.payload(), sorted({cut for cut, _ in specs})
    for (cut, direction), spec in specs.items():
        upper = cuts.index(cut)
        above, below = work.position_of[upper], work.position_of[upper + 1]
        if above == below:
            table.add_row(str(cut), direction, "within a rank", "", "", "", "")
            continue
        source, target = (above, below) if direction == "forward" else (below, above)
        message = messages[cut, direction]
        table.add_row(
            str(cut),
            direction,
            spec.words(),
            format_bytes(message.nbytes),
            f"{payload.link_s(source, target, message.nbytes) * 1e3:.3g} ms",
            f"{(message.encode_s + message.decode_s) * 1e3:.3g} ms",
            format_rate(network.rate_bps[source][target]),
        )
    return table
