import json
from pathlib import Path
from typing import get_args

import pytest

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.events import simulate
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.launch.plan.trace import predict_step, trace_run, transfers, write_trace
from thinpipe.launch.view.report.timeline import Timeline, read_timeline
from thinpipe.pipeline.wire.told import DIRECTIONS, ComputeEvent, ScheduleName, WireTotal

MODEL = Workload(
    replicas=1,
    schedule="GPipe",
    microbatches=2,
    forward_s=(1.0, 2.0, 1.0),
    backward_s=(2.0, 4.0, 2.0),
    activations=(Message(1000, 0.1, 0.2), Message(2000, 0.3, 0.4)),
    gradients=(Message(500, 0.05, 0.06), Message(600, 0.07, 0.08)),
)


def measured() -> Timeline:
    """What the ranks of MODEL would have recorded on a network that costs nothing."""
    return Timeline(
        step=7,
        schedule="GPipe",
        depth=1,
        microbatches=2,
        accumulate=1,
        pipeline_ranks=3,
        replicas=1,
        cuts=(4, 8),
        wire=tuple(
            WireTotal(
                cut=layer, direction=direction, nbytes=2 * message.nbytes, messages=2, values=2
            )
            for layer, pair in zip(
                (4, 8), zip(MODEL.activations, MODEL.gradients, strict=True), strict=True
            )
            for direction, message in zip(DIRECTIONS, pair, strict=True)
        ),
        events=simulate(MODEL).events,
    )


@pytest.mark.parametrize("network", [Network.uniform(3), Network.uniform(3, 1e4, 0.5)])
def test_predicted_step_has_the_times_and_sizes_of_the_measured_one(network: Network) -> None:
    expected = simulate(MODEL, network)
    assert predict_step(measured(), network).step_s == pytest.approx(expected.step_s)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_every_schedule_is_predicted_and_drawn(schedule: ScheduleName, tmp_path: Path) -> None:
    """A measured step that equals a simulated one is predicted to take as long."""
    single = schedule in ("GPipe", "1F1B", "Deep1F1B")
    ranks, cuts = (4 if single else 2), (2, 4, 6)
    message = Message(1000, 0.1, 0.2)
    work = Workload(
        replicas=1,
        schedule=schedule,
        microbatches=4,
        forward_s=(1.0, 2.0, 1.0, 1.5),
        backward_s=(2.0, 4.0, 2.0, 3.0),
        activations=(message,) * 3,
        gradients=(message,) * 3,
        ranks_per_pipeline=ranks,
    )
    network = Network.uniform(ranks, 1e6, 0.05)
    step = simulate(work, network)
    crossed = {(transfer.cut, transfer.direction) for transfer in step.transfers}
    assert len(crossed) == (4 if schedule == "ZBVZeroBubble" else 6)  # two stages of a V meet
    wire = [
        WireTotal(cut=cuts[cut], direction=direction, nbytes=4000, messages=4, values=4)
        for cut, direction in sorted(crossed)
    ]
    timeline = measured().model_copy(
        update={
            "schedule": schedule,
            "microbatches": 4,
            "depth": work.depth,
            "pipeline_ranks": ranks,
            "cuts": cuts,
            "wire": tuple(wire),
            "events": step.events,
        }
    )
    found = predict_step(timeline, network)
    assert found.step_s == pytest.approx(step.step_s, rel=1e-6)
    assert len(transfers(timeline)) == len(step.transfers)
    write_trace(tmp_path / "trace.json", timeline, found, title="")
    drawn = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "b" for event in drawn) == 2 * len(step.transfers)
    assert {event["pid"] for event in drawn} == {*range(ranks), *range(1000, 1000 + ranks)}


def test_messages_are_joined_from_sender_to_receiver() -> None:
    found = transfers(measured())
    assert len(found) == 8
    activation = next(t for t in found if (t.cut, t.direction, t.microbatch) == (0, "forward", 0))
    assert activation.start_s == pytest.approx(1.1)  # forward of 1 s, encoding of 0.1 s
    assert all(transfer.end_s >= transfer.start_s for transfer in found)


def test_trace_shows_both_steps_rank_by_rank(tmp_path: Path) -> None:
    measured().write(tmp_path)
    summary = trace_run(tmp_path, tmp_path / "trace.json", rate_bps=1e4, delay_s=0.0)
    assert "step 7, measured" in summary
    assert "s on the links of the run, predicted" in summary
    assert "s on links of 10 kbit/s\n" in summary
    free = trace_run(tmp_path, tmp_path / "trace.json", rate_bps=None, delay_s=0.02)
    assert "s on links without a limit and 20 ms one way\n" in free
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[1] == "rank 1 (stage 1)"
    assert names[1001] == "predicted: rank 1 (stage 1)"
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "F"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(0, 1e6), (1e6, 1e6)]
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 16


def test_concurrent_codecs_are_drawn_on_separate_tracks(tmp_path: Path) -> None:
    at = [("F", 0.0, 4.0), ("encode", 1.0, 3.0), ("decode", 2.0, 5.0), ("encode", 3.0, 4.0)]
    events = tuple(ComputeEvent(0, kind, 0, *span) for kind, *span in at)  # type: ignore[arg-type]
    write_trace(
        tmp_path / "trace.json", measured().model_copy(update={"events": events}), None, title=""
    )
    drawn = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [(e["cat"], e["ts"] / 1e6, e["tid"]) for e in drawn if e["ph"] == "X"]
    assert spans == [("F", 0, 0), ("encode", 1, 2), ("decode", 2, 3), ("encode", 3, 2)]
    names = {e["tid"]: e["args"]["name"] for e in drawn if e["name"] == "thread_name"}
    assert names == {0: "compute", 2: "codec", 3: "codec"}


def test_steps_that_cannot_be_simulated_still_have_a_trace(tmp_path: Path) -> None:
    measured().model_copy(update={"accumulate": 2}).write(tmp_path)
    summary = trace_run(tmp_path, tmp_path / "trace.json", rate_bps=None, delay_s=0.0)
    assert "not predicted" in summary
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert max(event["pid"] for event in events) == 2


def test_a_run_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.toml: no such folder; give that of a finished run"):
        read_timeline(tmp_path / "run.toml")
    with pytest.raises(ValueError, match="no timeline"):
        read_timeline(tmp_path)
    (tmp_path / "timeline.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="not a timeline"):
        read_timeline(tmp_path)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    measured().write(tmp_path)
    out = tmp_path / "gone" / "trace.json"
    with pytest.raises(ValueError, match=r"--out = .*gone/trace\.json: cannot be written: No such"):
        trace_run(tmp_path, out, rate_bps=None, delay_s=0.0)


def test_events_survive_the_file(tmp_path: Path) -> None:
    measured().write(tmp_path)
    assert read_timeline(tmp_path) == measured()
    assert isinstance(read_timeline(tmp_path).events[0], ComputeEvent)
