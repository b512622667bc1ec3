"""The pipeline of a program: a model, its cuts, and how they are compressed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError
from torch import Tensor, nn

from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.errors import explain
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.models.hf.config import LoraConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.example import Functions
from thinpipe.pipeline.models.own.functions import name_of, program_of


class Pipeline:
    """Your own model, cut into stages, and how the cuts are compressed.

    `model()` returns an `nn.Sequential`, or a module whose forward runs the blocks of a list one
    after the other. It is called on the meta device, and each rank gives values to its own layers
    only. `loss(outputs, targets)` returns the sum of the losses and their
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

        `cuts` are the first layers (or blocks) of all stages after stage 0; `cuts = "auto"`
        measures where `stages` are best cut. `exchange` is how replicas are kept together: a
        method's name, or its name with options, as in {"method": "cocktail", "cocktail": {...}}.
        `from_run` is the folder of a run whose weights this one starts with.

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
        self._set(
            OwnModelConfig.of(functions, program=program, **names),
            {"cuts": cuts, "stages": stages, "microbatches": microbatches, **pipeline},
            boundary,
            replicas=replicas,
            exchange=exchange,
        )

    @classmethod
    def from_pretrained(  # noqa: PLR0913  # one parameter per setting
        cls,
        folder: str | Path,
        *,
        lora: LoraConfig | Mapping[str, Any] | None = None,
        classes: int | None = None,
        cuts: Sequence[int] | Literal["auto"] = "auto",
        stages: int | None = None,
        microbatches: int = 4,
        boundary: BoundaryConfig | Sequence[BoundaryConfig] = (),
        replicas: int = 1,
        exchange: str | Mapping[str, Any] = "allreduce",
        model: Mapping[str, Any] | None = None,
        **pipeline: Any,
    ) -> Self:
        """A Hugging Face model from its folder.

        `lora` trains low-rank additions alone, as in {"rank": 8, "targets": ["q_proj"]}; `classes`
        puts a classification head on an encoder. `model` has further settings of a run file's
        [model], such as `dropout`; the rest is as in `Pipeline`.

        Raises:
            ValueError: the folder holds no model that can be cut.
        """
        sections = {"pretrained": str(folder), "lora": lora, "classes": classes, **(model or {})}
        if classes is not None:
            sections.setdefault("task", "classification")
        pipe = cls.__new__(cls)
        pipe._set(
            {name: value for name, value in sections.items() if value is not None},
            {"cuts": cuts, "stages": stages, "microbatches": microbatches, **pipeline},
            boundary,
            replicas=replicas,
            exchange=exchange,
        )
        return pipe

    def _set(
        self,
        model: OwnModelConfig | dict[str, Any],
        pipeline: dict[str, Any],
        boundary: BoundaryConfig | Sequence[BoundaryConfig],
        *,
        replicas: int,
        exchange: str | Mapping[str, Any],
    ) -> None:
        if pipeline["cuts"] == "auto" and (pipeline["stages"] or 1) == 1:
            pipeline |= {"cuts": (), "stages": None}
        cuts = pipeline["cuts"]
        listed = list(cuts) if isinstance(cuts, Sequence) and not isinstance(cuts, str) else cuts
        pipeline |= {"cuts": listed, "replicas": replicas}
        self.sections: dict[str, Any] = {
            "model": model,
            "pipeline": {name: value for name, value in pipeline.items() if value is not None},
            "boundary": [boundary] if isinstance(boundary, BoundaryConfig) else list(boundary),
            "gradcomp": {"method": exchange} if isinstance(exchange, str) else dict(exchange),
            "train": {"batch_size": replicas, "accumulate": 1},  # `Run.batches` says how many
            "data": {"factory": "__main__:samples"},
        }
        config = config_of(self.sections, "Pipeline")
        self.sections["model"] = self.model = config.model
        self._is_cut = config.pipeline.stages > 1

    @cached_property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return self.model.whole_parameters(cut=self._is_cut)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of the whole model, without values; alike on all ranks."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the whole model, to make an optimizer with; alike on all ranks.

        They have no values: each rank trains with those of its own layers in their places.
        """
        yield from self._parameters.values()


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
