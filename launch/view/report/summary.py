"""Summary of a run, from its step records."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import TypedDict

from thinpipe.launch.host.words import WireKey, format_bytes, format_ratio
from thinpipe.launch.view.report.edges import Edge
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.pipeline.wire.told import Direction, WireTotal


class Traffic(TypedDict):
    """Bytes sent, headers included, and the size of the same values uncompressed.

    A ratio is uncompressed size over bytes sent; None if nothing was sent.
    """

    bytes: int
    messages: int
    bf16_bytes: int
    fp32_bytes: int
    ratio_bf16: float | None
    ratio_fp32: float | None


class _Named(TypedDict):
    worst_error: float | None
    worst_channel: int | None
    largest_channel: int | None
    largest_share: float | None


class WireTraffic(Traffic, _Named):
    """The traffic of one cut in one direction over the whole run.

    What was measured of its values (`ErrorStats`) are means over the last epoch. The worst channel
    is that of the largest error in it; the largest one is the one that was it most often.
    """

    cut: int
    direction: Direction
    method: str
    error: float | None
    change: float | None
    cosine: float | None
    channel_error: float | None
    channel_change: float | None
    massive_tokens: float | None
    gain: float | None
    dimensions: float | None


class Summary(TypedDict):
    """Summary of a run as JSON values: None stands for NaN and infinity.

    `final_loss` is the mean over the last epoch's steps, `first_loss` that of the first step that
    has one. `eval` is the last evaluation. `sync_ratio_fp32` compares the bytes between
    replicas with one fp32 ring all-reduce of the gradients per step. `repaired` counts, by cut,
    samples whose cache entries were reset. `wall_s` is the sum of step times, without start-up and
    evaluations. `unit` is what `tokens` counts: tokens, or samples in classification.
    `weight_bytes` and `gradient_bytes` went between the shards of stages. `edges` are the
    connections between hosts, of the present start only. `samples` are those trained on, by epoch
    from 1: fewer than there are if replicas cannot share them evenly. Epochs that an earlier
    version trained are left out, as it did not count them.
    """

    name: str
    stages: int
    replicas: int
    shards: int
    schedule: str
    microbatches: int
    parameters: int
    steps: int
    epochs: int
    tokens: int
    unit: str
    first_loss: float | None
    final_loss: float | None
    eval: dict[str, float | None] | None
    median_tokens_per_s: float
    median_step_s: float
    mean_bubble: float
    wire: list[WireTraffic]
    totals: Traffic
    sync_bytes: int
    sync_ratio_fp32: float | None
    control_bytes: int
    weight_bytes: int
    gradient_bytes: int
    edges: list[Edge]
    repaired: dict[str, int]
    skipped: int
    samples: dict[str, int]
    wall_s: float
    machine: str
    versions: dict[str, str]
    config_digest: str


def summarize(info: RunInfo, records: Sequence[StepRecord], edges: Sequence[Edge] = ()) -> Summary:
    """Condense the steps of a run, also those before its cuts moved.

    Raises:
        ValueError: there are no steps.
    """
    if not records:
        raise ValueError(f"{info.folder}: no step was recorded; train at least one step to report")
    wire = [_wire_traffic(info, records, key) for key in info.wire_keys(records)]
    last_epoch = [record.loss for record in records if record.epoch == records[-1].epoch]
    finite = [loss for loss in last_epoch if math.isfinite(loss)]
    evaluations = [record.eval for record in records if record.eval is not None]
    return Summary(
        name=info.name,
        stages=info.stages,
        replicas=info.replicas,
        shards=info.shards,
        schedule=info.schedule,
        microbatches=info.microbatches,
        parameters=info.parameters,
        steps=len(records),
        epochs=len({record.epoch for record in records}),
        tokens=sum(record.tokens for record in records),
        unit=info.unit,
        first_loss=next((r.loss for r in records if math.isfinite(r.loss)), None),
        final_loss=_mean_of_known(finite),
        eval={k: v if math.isfinite(v) else None for k, v in evaluations[-1].items()}
        if evaluations
        else None,
        median_tokens_per_s=median(record.tokens_per_s for record in records),
        median_step_s=median(record.step_s for record in records),
        mean_bubble=fmean(record.bubble for record in records),
        wire=wire,
        totals=_traffic(
            sum(row["bytes"] for row in wire),
            messages=sum(row["messages"] for row in wire),
            values=sum(row["bf16_bytes"] for row in wire) // 2,
        ),
        sync_bytes=sum(record.sync_bytes for record in records),
        sync_ratio_fp32=_sync_ratio(info, records),
        control_bytes=sum(record.control_bytes for record in records),
        weight_bytes=sum(record.weight_bytes for record in records),
        gradient_bytes=sum(record.gradient_bytes for record in records),
        edges=list(edges),
        repaired={
            str(cut): sum(record.repaired.get(cut, 0) for record in records)
            for cut in sorted({cut for record in records for cut in record.repaired})
        },
        skipped=sum(record.skipped for record in records),
        samples=_samples(records),
        wall_s=sum(record.step_s for record in records),
        machine=info.machine,
        versions=dict(info.versions),
        config_digest=info.config_digest,
    )


def direction_bytes(summary: Summary, direction: Direction) -> int:
    """Activations (forward) or their gradients (backward) of all cuts, in bytes."""
    return sum(row["bytes"] for row in summary["wire"] if row["direction"] == direction)


def traffic_cells(row: Traffic) -> list[str]:
    """Columns of a traffic table: messages, sent, bf16, ratio, fp32, ratio."""
    return [
        f"{row['messages']:,}",
        format_bytes(row["bytes"]),
        format_bytes(row["bf16_bytes"]),
        format_ratio(row["ratio_bf16"]),
        format_bytes(row["fp32_bytes"]),
        format_ratio(row["ratio_fp32"]),
    ]


def _sync_ratio(info: RunInfo, records: Sequence[StepRecord]) -> float | None:
    sent = sum(record.sync_bytes for record in records)
    ring = 4 * 2 * (info.replicas - 1) * info.exchanged * len(records)
    return ring / sent if sent and ring else None


def _samples(records: Sequence[StepRecord]) -> dict[str, int]:
    """By epoch; without those of which a step, of an earlier version, does not know them."""
    found = Counter[str]()
    for record in records:
        found[str(record.epoch)] += record.samples or 0
    unknown = {str(record.epoch) for record in records if record.samples is None}
    return {epoch: count for epoch, count in found.items() if epoch not in unknown}


def _wire_traffic(info: RunInfo, records: Sequence[StepRecord], key: WireKey) -> WireTraffic:
    counts = {
        record.step: count
        for record in records
        for count in record.wire
        if (count.cut, count.direction) == key
    }
    last = [r.step for r in records if r.epoch == records[-1].epoch]
    measured = [counts[step] for step in last if step in counts]
    traffic = _traffic(
        sum(count.nbytes for count in counts.values()),
        messages=sum(count.messages for count in counts.values()),
        values=sum(count.values for count in counts.values()),
    )
    return WireTraffic(
        cut=key[0],
        direction=key[1],
        method=info.method(key),
        error=_mean_of_known([count.error for count in measured]),
        change=_mean_of_known([count.change for count in measured]),
        cosine=_mean_of_known([count.cosine for count in measured]),
        channel_error=_mean_of_known([count.channel_error for count in measured]),
        channel_change=_mean_of_known([count.channel_change for count in measured]),
        **_named_channels(measured),
        massive_tokens=_mean_of_known([count.massive_tokens for count in measured]),
        gain=_mean_of_known([count.gain for count in measured]),
        dimensions=_mean_of_known([count.dimensions for count in measured]),
        **traffic,
    )


def _named_channels(measured: Sequence[WireTotal]) -> _Named:
    """Those of the largest error, and of the most energy, with its share when it was that."""
    errors = [(m.worst_error, m.worst_channel) for m in measured if m.worst_error is not None]
    worst_error, worst_channel = max(errors, default=(None, None))
    often = Counter(m.largest_channel for m in measured if m.largest_channel is not None)
    largest = often.most_common(1)[0][0] if often else None
    shares = [m.largest_share for m in measured if m.largest_channel == largest]
    return _Named(
        worst_error=worst_error,
        worst_channel=worst_channel,
        largest_channel=largest,
        largest_share=_mean_of_known(shares),
    )


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _traffic(nbytes: int, *, messages: int, values: int) -> Traffic:
    return Traffic(
        bytes=nbytes,
        messages=messages,
        bf16_bytes=2 * values,
        fp32_bytes=4 * values,
        ratio_bf16=2 * values / nbytes if nbytes else None,
        ratio_fp32=4 * values / nbytes if nbytes else None,
    )
