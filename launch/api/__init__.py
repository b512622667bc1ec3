"""ThinPipe: pipeline-parallel training over slow networks, with every link compressed.

Your own program:

    import thinpipe as tp

    pipe = tp.Pipeline(model, loss, stages=4, boundary=tp.Boundary(forward=tp.AQSGD(bits=4)))
    run = tp.Run("runs/mine", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3))
    for epoch in run.epochs(3):
        for batch in run.batches(samples, size=32):
            run.step(batch)

`pipeline` is the engine, `aqsgd` and `gradcomp` compress what crosses cuts and joins replicas,
`launch` configures, starts and watches runs.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from thinpipe.aqsgd.config import AqsgdConfig as AQSGD  # noqa: N814  the method's name
    from thinpipe.aqsgd.config import GradientAqsgdConfig as GradientAQSGD
    from thinpipe.aqsgd.transform.config import GradientTransformConfig as GradientTransform
    from thinpipe.aqsgd.transform.config import TransformConfig as Transform
    from thinpipe.launch.config.boundary import BoundaryConfig as Boundary
    from thinpipe.launch.run.pipeline import Pipeline
    from thinpipe.launch.run.program import Run
    from thinpipe.launch.trained.model import load
    from thinpipe.pipeline.config import DirectConfig as Direct
    from thinpipe.pipeline.config import RawConfig as Raw
    from thinpipe.pipeline.config import StatelessConfig as Stateless

__all__ = [
    "AQSGD",
    "Boundary",
    "Direct",
    "GradientAQSGD",
    "GradientTransform",
    "Pipeline",
    "Raw",
    "Run",
    "Stateless",
    "Transform",
    "load",
]

_PLACES = {
    "AQSGD": ("aqsgd.config", "AqsgdConfig"),
    "Boundary": ("launch.config.boundary", "BoundaryConfig"),
    "Direct": ("pipeline.config", "DirectConfig"),
    "GradientAQSGD": ("aqsgd.config", "GradientAqsgdConfig"),
    "GradientTransform": ("aqsgd.transform.config", "GradientTransformConfig"),
    "Pipeline": ("launch.run.pipeline", "Pipeline"),
    "Raw": ("pipeline.config", "RawConfig"),
    "Run": ("launch.run.program", "Run"),
    "Stateless": ("pipeline.config", "StatelessConfig"),
    "Transform": ("aqsgd.transform.config", "TransformConfig"),
    "load": ("launch.trained.model", "load"),
}
"""Imported when they are first used: torch takes seconds."""


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import version  # takes as long as all else that help needs

        return version("thinpipe")
    if name not in _PLACES:
        raise AttributeError(
            f"module 'thinpipe' has no attribute {name!r}; it has {', '.join(_PLACES)}"
        )
    module, member = _PLACES[name]
    return getattr(_import_module(f"thinpipe.{module}"), member)
