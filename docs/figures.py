"""`python docs/figures.py`: the pictures of these pages, drawn by the planner's simulator."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from thinpipe.launch.plan.network import Network
from thinpipe.launch.plan.simulate import Message, StepModel, simulate
from thinpipe.launch.report.timeline_plot import timeline_png
from thinpipe.pipeline.wire.header import HEADER_NBYTES

_IMAGES = Path(__file__).parent / "images"
_VALUES = 1024 * 1600


def main() -> None:
    """Write the images."""
    fp32 = Message(HEADER_NBYTES + 4 * _VALUES)
    slow = Network.uniform(4, 300e6, 0.01)
    model = StepModel(
        schedule="1F1B",
        microbatches=8,
        forward_s=(0.072,) * 4,
        backward_s=(0.144,) * 4,
        activations=(fp32,) * 3,
        gradients=(fp32,) * 3,
    )
    fw3 = Message(HEADER_NBYTES + 3 * _VALUES // 8 + 2 * 1024)
    bw6 = Message(HEADER_NBYTES + 6 * _VALUES // 8 + 2 * 1024)
    thin = replace(model, activations=(fw3,) * 3, gradients=(bw6,) * 3, network=slow.payload())
    models: Mapping[str, StepModel] = {
        "fast_link": model,
        "slow_link": replace(model, network=slow.payload()),
        "thin_messages": thin,
        "deep": replace(thin, schedule="Deep1F1B"),
    }
    for name, played in models.items():
        step = simulate(played)
        (_IMAGES / f"{name}.png").write_bytes(timeline_png(step.events))
        print(f"{name}: {step.step_s:.2f} s")


if __name__ == "__main__":
    main()
