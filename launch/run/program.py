"""What Python programs import as `thinpipe`: a pipeline of your own modules, and its run.

The program runs on every rank. `thinpipe run` starts the ranks; torchrun does too.
"""

import atexit
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from thinpipe.launch.build import ProgramParts
from thinpipe.launch.checkpoint.resume import Resume, after_restart
from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.errors import explain
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.own import Dataset, OwnSet
from thinpipe.launch.net.ranks.session import SHOW
from thinpipe.launch.optimizer import rebind
from thinpipe.launch.run.ending import end_done, end_failed
from thinpipe.launch.run.run import RankRun
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.models.own.config import Functions, OwnModelConfig
from thinpipe.pipeline.models.own.functions import name_of
from thinpipe.pipeline.models.own.program import LOOKING, NotRun, program_of

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Pipeline:
    """Your own model, cut into stages, and how the cuts are compressed.

    `model()` returns an `nn.Sequential`; it is called on the meta device, and each rank gives
    values to its own layers only. `loss(outputs, targets)` returns the sum of the losses and their
    number; `count(targets)` returns the number alone, and is needed if it depends on the values of
    targets. Without a loss it is next-token cross entropy.
    """

    def __init__(  # noqa: PLR0913  # one parameter per setting
        self,
        model: Callable[[], nn.Module],
        loss: Callable[[Tensor, Tensor], tuple[Tensor, int]] | None = None,
        *,
        count: Callable[[Tensor], int] | None = None,
        cuts: Sequence[int] | Literal["auto"] = "auto",
        stages: int | None = None,
        microbatches: int = 4,
        boundary: BoundaryConfig | Sequence[BoundaryConfig] = (),
        replicas: int = 1,
        exchange: str | Mapping[str, Any] = "allreduce",
        from_run: str | Path | None = None,
        **pipeline: Any,
    ) -> None:
        """`pipeline` has further settings of a run file's [pipeline], such as `schedule`.

        `cuts` are the first layers of the stages but the first; `cuts = "auto"` measures where
        `stages` are best cut. `exchange` is how replicas are kept together: a method's name, or
        its name with options, as in {"method": "cocktail", "cocktail": {...}}. `from_run` is the
        folder of a run whose weights this one starts with.

        Raises:
            ValueError: the model cannot be built without values, or cannot be cut.
        """
        if isinstance(model, nn.Module):
            raise ConfigError(
                f"Pipeline: model is a {type(model).__name__}; give the function that makes it, "
                "without calling it: it runs on the meta device, so that no rank holds the whole"
            )
        functions = Functions(model, loss, count)
        names = {"loss": loss and name_of(loss), "count": count and name_of(count)}
        program = program_of(*filter(None, (model, loss, count)))
        names |= {"factory": name_of(model), "from_run": str(from_run) if from_run else None}
        self.model = OwnModelConfig.of(functions, program=program, **names)
        stages_given = {} if stages is None else {"stages": stages}
        if cuts == "auto" and (stages or 1) == 1:
            cuts, stages_given = (), {}
        self.sections: dict[str, Any] = {
            "model": self.model,
            "pipeline": {
                "cuts": cuts if isinstance(cuts, str) else list(cuts),
                "microbatches": microbatches,
                "replicas": replicas,
                **stages_given,
                **pipeline,
            },
            "boundary": [boundary] if isinstance(boundary, BoundaryConfig) else list(boundary),
            "gradcomp": {"method": exchange} if isinstance(exchange, str) else dict(exchange),
            "train": {"batch_size": replicas, "accumulate": 1},  # `Run.batches` says how many
        }
        config_of(self.sections, "Pipeline")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of the whole model, without values; alike on all ranks."""
        return self.model.deferred.skeleton.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the whole model, to make an optimizer with; alike on all ranks.

        They have no values: each rank trains with those of its own layers in their places.
        """
        return self.model.deferred.skeleton.parameters()


class Run(RankRun):
    """Training of a pipeline in a folder, as one of its ranks; all ranks run the same program.

        run = Run("runs/mine", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3))
        for epoch in run.epochs(3):
            for batch in run.batches(samples, size=32):
                step = run.step(batch)
            run.evaluate(held_out)
        run.save_model("mine.safetensors")

    It is closed when the program ends, or by `with Run(...) as run`.
    """

    def __init__(  # noqa: PLR0913  # one parameter per setting
        self,
        folder: str | Path,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        *,
        resume: Literal["if-there", "required", "never"] | int = "if-there",
        schedule: Callable[[int], float] | None = None,
        seed: int = 0,
        clip_norm: float = 0.0,
        writers: Sequence[str] = (),
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Nothing is waited for before the first epoch begins.

        `optimizer` was made with `pipeline.parameters()`, or is a function of this rank's named
        parameters, or AdamW by `settings["train"]`. Its learning rates are multiplied by
        `schedule(step)`, step from 0. `resume`: from the newest checkpoint if there is one, always
        (an error if there is none), or never; a number is the step of the checkpoint. `clip_norm`
        limits the gradient norm, 0 does not. `writers` get the numbers of every step too:
        "tensorboard", "wandb", "trackio". `settings` are other sections of a run file, by name:
        checkpoint, memory, network.

        Raises:
            ConfigError: a setting is wrong.
        """
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(
                f"Run: pipeline is a {type(pipeline).__name__}; give it a thinpipe.Pipeline(model, "
                "loss, ...) of that model"
            )
        train = {"warmup_steps": 0, "decay": "none", "clip_norm": clip_norm}
        chosen: Mapping[str, Mapping[str, Any]] = {
            **({"report": {"writers": list(writers)}} if writers else {}),
            **(settings or {}),
        }
        config = _config(folder, pipeline, seed, train | _described(optimizer), chosen)
        _found(config)
        self._hook = sys.excepthook  # the program's, before torch puts its own around it
        given = ProgramParts(_factory(optimizer, pipeline), schedule)
        super().__init__(config, _resume(resume), show=_shown(), given=given)
        running = _RUNNING.get()
        if running is not None:
            running.append(self)
        else:
            _end_with_interpreter(self)

    def batches(self, samples: Dataset, size: int) -> Iterator[Batch]:
        """This replica's batches of what is left of the epoch; give each to `step`.

        `samples` is a map-style dataset of (input, target); a sample's index is its id. `size` is
        the samples of a step over all replicas.

        Raises:
            ValueError: the samples do not fit the model, or changed since the last epoch.
        """
        name = name_of(type(samples))
        self.config = self.config.updated(data={"factory": name})
        return self.batches_of(OwnSet(samples, name), size)

    def evaluate(self, samples: Dataset) -> dict[str, float]:
        """Metrics on a dataset: `loss`, and with cuts `loss_compressed`; alike on all ranks."""
        return self.evaluate_on(OwnSet(samples, name_of(type(samples))))


class RunRequested(NotRun):
    """Raised where a run would begin, with what the program wants it to be."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__("only looked at")
        self.config = config


_RUNNING: ContextVar[list[Run] | None] = ContextVar("running", default=None)
"""The runs that whoever runs the program will close."""


def run_program(program: Callable[[], None]) -> NoReturn:
    """Run a program as a rank, close its runs, and end the process."""
    runs: list[Run] = []
    _RUNNING.set(runs)
    try:
        program()
        for run in reversed(runs):
            run.__exit__(None, None, None)
    except BaseException as error:
        _end_failed(runs, error)
    end_done()


def config_of(sections: Mapping[str, Any], where: str) -> RunConfig:
    """The config of these sections.

    Raises:
        ConfigError: one is wrong.
    """
    try:
        return RunConfig.model_validate(sections)
    except ValidationError as error:
        lines = explain(error, RunConfig)
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def _config(
    folder: str | Path,
    pipeline: Pipeline,
    seed: int,
    train: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
) -> RunConfig:
    name = Path(folder).name
    named = {"name": name} if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) else {}
    sections = {
        **pipeline.sections,
        "run": {"folder": str(folder), "seed": seed, **named},
        "data": {"factory": "__main__:samples"},
        **settings,
        "train": {**pipeline.sections["train"], **train, **settings.get("train", {})},
    }
    return config_of(sections, "Run")


def _found(config: RunConfig) -> None:
    if LOOKING.get():
        raise RunRequested(config)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        program = getattr(sys.modules["__main__"], "__file__", None)
        start = f"start it with `thinpipe run {Path(program or '').name}`, or under torchrun"
        if program is None:
            start = (
                "write the program to a file (in a notebook: begin the cell with %%writefile "
                "mine.py), and start that with `thinpipe run mine.py` (in a notebook: !thinpipe "
                'run mine.py); thinpipe.load("runs/...") gives its model here'
            )
        count = config.world_size
        raise ConfigError(f"this run needs {count} process{'es' * (count > 1)}; {start}")


def _described(optimizer: Any) -> dict[str, Any]:
    """What the run's config records of the optimizer."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": name_of(optimizer)}
    rate = optimizer.defaults.get("lr")
    return {
        "optimizer": name_of(type(optimizer)),
        **({"lr": float(rate)} if rate is not None and float(rate) > 0 else {}),
    }


def _factory(optimizer: Any, pipeline: Pipeline) -> Any:
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        names = {parameter: name for name, parameter in pipeline.named_parameters()}
        return lambda real: rebind(optimizer, names, real)
    return lambda real: optimizer(list(real.items()))


def _resume(resume: str | int) -> Resume:
    if isinstance(resume, int) and not isinstance(resume, bool):
        return Resume(True, resume)
    known = {
        "if-there": Resume(True, required=False),
        "required": Resume(True),
        "never": after_restart(Resume(False)),
    }
    if resume not in known:
        raise ConfigError(f'resume = {resume!r}: use "if-there", "required", "never" or a step')
    return known[str(resume)]


def _shown() -> int:
    return int(os.environ.get(SHOW, "0"))


def _end_with_interpreter(run: Run) -> None:
    """Close the run when the program ends by itself, or by an error that nothing caught."""
    atexit.register(run.__exit__, None, None, None)

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end_failed([run], error)

    sys.excepthook = fail


def _end_failed(runs: Sequence[Run], error: BaseException) -> NoReturn:
    """Close the runs, whose peers may know what failed first, and end the process.

    The program's own `sys.excepthook` hears of what was raised there.
    """
    hook = runs[-1]._hook if runs else sys.excepthook
    if hook is not sys.__excepthook__ and isinstance(error, Exception):
        with suppress(Exception):
            hook(type(error), error, error.__traceback__)
    try:
        for run in reversed(runs):
            run.__exit__(type(error), error, error.__traceback__)
    except BaseException as first:
        error = first
    config = runs[-1].config if runs else None
    end_failed(error, config, resume='tp.Run(..., resume="if-there")')
