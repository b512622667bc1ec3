"""Settings of a model of the user's own, and what can be known of it without values."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import PrivateAttr, ValidationInfo, model_validator
from torch import Tensor, nn

from thinpipe.pipeline.models.kind import Example, ModelKind

if TYPE_CHECKING:
    from thinpipe.pipeline.loss import Objective
    from thinpipe.pipeline.models.own.deferred import DeferredModel
    from thinpipe.pipeline.models.own.stage import OwnStage

_SAMPLES = 2
"""In the batch whose shapes are computed: enough to tell the axis of samples from others."""


@dataclass(frozen=True)
class Functions:
    """The user's functions: `make()` is the model; `loss` and `count` are as in `OwnLoss`."""

    make: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = None
    count: Callable[[Tensor], int] | None = None


class OwnModelConfig(ModelKind):
    """A model of one's own: an `nn.Sequential` that a function returns, cut between its layers.

    `factory`, `loss` and `count` are written "module:function". `loss(outputs, targets)` returns
    the sum of the losses and their number, by default next-token cross entropy; `count(targets)`
    returns their number alone, which is needed if it depends on the values of targets. `from_run`
    is the folder of a run whose weights this one starts from. `program` is recorded of a run whose
    functions its program defined itself (module `__main__`): the file, and its arguments.
    """

    tag: ClassVar = "own"

    factory: str
    loss: str | None = None
    count: str | None = None
    from_run: str | None = None
    program: tuple[str, ...] = ()
    task: ClassVar[Literal["language"]] = "language"  # what settings of other models say
    classes: ClassVar[None] = None
    tie_embeddings: ClassVar[Literal["untied"]] = "untied"
    _functions: Functions | None = PrivateAttr(None)
    _example: Example | None = PrivateAttr(None)

    @classmethod
    def of(
        cls, functions: Functions, *, program: Sequence[str] = (), **names: str | None
    ) -> "OwnModelConfig":
        """The settings of functions that are here already; `names` are only recorded."""
        config = cls.model_validate({**names, "program": program})
        config._functions = functions
        return config

    @model_validator(mode="after")
    def _take_given(self, info: ValidationInfo) -> Self:
        """Functions of the validation's context are taken in place of those that are named."""
        if info.context is not None:
            self._functions = info.context.get("functions")
        return self

    def with_example(self, example: Example) -> Self:
        config = self.model_copy()
        config.__dict__.pop("outputs", None)
        config._example = example
        return config

    @cached_property
    def functions(self) -> Functions:
        """The functions.

        Raises:
            ValueError: one cannot be imported.
        """
        if self._functions is not None:
            return self._functions
        from thinpipe.pipeline.models.own.functions import load_function

        return Functions(
            load_function(self.factory, "model.factory", self.program),
            load_function(self.loss, "model.loss", self.program) if self.loss else None,
            load_function(self.count, "model.count", self.program) if self.count else None,
        )

    @cached_property
    def deferred(self) -> "DeferredModel":
        """The model without values.

        Raises:
            ValueError: it cannot be built so, or is no `nn.Sequential`.
        """
        from thinpipe.pipeline.models.own.deferred import DeferredModel

        where = f'model.factory = "{self.factory}"'
        deferred = DeferredModel(self.functions.make, where)
        model = deferred.skeleton
        if not isinstance(model, nn.Sequential) or not len(model):
            raise ValueError(
                f"{where}: returned {type(model).__name__}; it is cut between the layers of an "
                "nn.Sequential: return one, in which every layer takes one tensor and returns one"
            )
        return deferred

    @cached_property
    def names(self) -> list[str]:
        """Names of the layers, which names of parameters begin with."""
        return [name for name, _ in self.deferred.skeleton.named_children()]

    @property
    def layers(self) -> int:
        return len(self.names)

    @property
    def example(self) -> Example:
        """One sample.

        Raises:
            ValueError: no data are loaded.
        """
        if self._example is None:
            raise ValueError(
                f'model.factory = "{self.factory}": sizes of messages follow from the data, which '
                "are not loaded here"
            )
        return self._example

    @cached_property
    def outputs(self) -> list[Tensor]:
        """Every layer's output for two samples, on the meta device.

        Raises:
            ValueError: a layer fails without values, or does not return a tensor.
        """
        x, found = _batch(self.example.x), []
        modules = dict(self.deferred.skeleton.named_children())
        for index, (name, layer) in enumerate(modules.items()):
            try:
                with torch.no_grad():
                    x = layer(x)
            except Exception as error:
                raise ValueError(
                    f'model.factory = "{self.factory}": layer {index} ("{name}", '
                    f"{type(layer).__name__}) fails for an input of shape {_shape(x)} on the meta "
                    f"device, where sizes of messages are computed: {type(error).__name__}: "
                    f"{error}; make its input fit, and let it not look at values of tensors"
                ) from error
            if not isinstance(x, Tensor):
                raise ValueError(
                    f'model.factory = "{self.factory}": layer {index} ("{name}", '
                    f"{type(layer).__name__}) returns {type(x).__name__}; a stage sends one "
                    "tensor: return one"
                )
            found.append(x)
        return found

    def message_shape(self, cut: int) -> tuple[int, int] | None:
        """[T, D] of a sample at a cut; None if what crosses it is something else."""
        y = self.outputs[cut - 1]
        fits = y.ndim == 3 and len(y) == _SAMPLES and y.is_floating_point()
        return (y.shape[1], y.shape[2]) if fits else None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, shapes and types of all parameters and buffers."""
        state = self.deferred.skeleton.state_dict()
        text = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def structure(self) -> str:
        """A model's identity, in words and by its digest."""
        numel = sum(parameter.numel() for parameter in self.deferred.skeleton.parameters())
        return f"{self.layers} layers, {numel:,} parameters, {self.digest[:16]}"

    def facts(self) -> dict[str, str]:
        return {"structure": self.structure}

    def build(self, first: int, stop: int, *, seed: int, device: torch.device | str) -> "OwnStage":
        from thinpipe.pipeline.models.own.stage import build_own

        return build_own(self, first, stop, seed=seed, device=device)

    def objective(self) -> "Objective":
        if self.functions.loss is None:
            return super().objective()
        from thinpipe.pipeline.models.own.loss import OwnLoss

        return OwnLoss(self.functions.loss, self.functions.count, self.outputs[-1])

    def sample_shape(self, tokens: int) -> tuple[int, int]:
        return self.usual_shape or (1, 1)  # a model that cannot be cut sends nothing

    def made_up(
        self, first: int, shape: torch.Size, *, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        x, target = self.example
        x = x if first == 0 else self.outputs[first - 1][0]
        inputs, targets = (
            torch.zeros(shape[0], *part.shape, dtype=part.dtype, device=device)
            for part in (x, target)
        )
        return (inputs.normal_() if inputs.is_floating_point() else inputs), targets

    def cut_places(self, stages: int) -> Sequence[int]:
        self.check_stages(stages)
        return self.places

    @property
    def could_be_tied(self) -> bool:
        return False

    @property
    def repeat_dropout(self) -> str:
        return "set the rates of dropout layers to 0"

    @property
    def fresh_dropout(self) -> float:
        kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
        modules = self.deferred.skeleton.modules()
        return max((m.p for m in modules if isinstance(m, kinds)), default=0.0)

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Check that the model can be cut there; sizes only where samples are known.

        Raises:
            ValueError: layers on both sides share a parameter, or messages have no fixed size.
        """
        shared = self._shared(cuts)
        if shared is not None:
            before, after, cut = shared
            raise ValueError(
                f"pipeline.cuts = {list(cuts)}: {before} and {after} are one parameter, and the "
                f"cut {cut} lies between them; "
                + ("move the cut, or untie them" if self._untied_places else _UNTIE)
            )
        if self._example is None or not cuts:
            return
        shapes = {cut: self.message_shape(cut) for cut in range(1, self.layers)}
        for cut in cuts:
            if shapes[cut] is None or shapes[cut] != shapes[cuts[0]]:
                raise ValueError(self._cannot_cut(cut, cuts, shapes))

    def check_stages(self, stages: int) -> None:
        """Check that there are places to cut it into so many; only where samples are known.

        Raises:
            ValueError: there are not; says why.
        """
        if self._example is None or stages - 1 <= len(self.places):
            return
        where = f"pipeline.stages = {stages}: the model can be cut in {len(self.places)} places"
        shared = self._shared(range(1, self.layers))
        if shared is not None:
            before, after, _ = shared
            why = f"only, as {before} and {after} are one parameter, which no cut may divide"
            remedy = "untie them, or use fewer stages" if self.places else _UNTIE
            raise ValueError(f"{where} {why}; {remedy}")
        raise ValueError(
            f"{where} only, where messages are equally long; use at most {len(self.places) + 1}"
        )

    def _cannot_cut(
        self, cut: int, cuts: Sequence[int], shapes: Mapping[int, tuple[int, int] | None]
    ) -> str:
        y = self.outputs[cut - 1]
        usual = self.usual_shape
        where = [other for other, shape in shapes.items() if shape == usual]
        remedy = (
            f"cut where it is {list(usual)} per sample: before layers {_listed(where)}"
            if usual
            else "let layers between cuts return [samples, tokens, width]"
        )
        return (
            f"pipeline.cuts = {list(cuts)}: layer {cut - 1} returns {y.dtype} of shape "
            f"{list(y.shape)} for {_SAMPLES} samples; what crosses cuts must be floats of shape "
            f"[samples, tokens, width], the same at every cut; {remedy}"
        )

    @property
    def usual_shape(self) -> tuple[int, int] | None:
        """[T, D] of a sample at most places between layers; None if it can be cut nowhere."""
        found = [self.message_shape(cut) for cut in range(1, self.layers)]
        shapes = Counter(shape for shape in found if shape is not None)
        return shapes.most_common(1)[0][0] if shapes else None

    @property
    def places(self) -> list[int]:
        """Where it can be cut, all with messages of the usual shape."""
        return [cut for cut in self._untied_places if self.message_shape(cut) == self.usual_shape]

    @property
    def _untied_places(self) -> list[int]:
        return [cut for cut in range(1, self.layers) if not self._shared([cut])]

    def _shared(self, cuts: Sequence[int]) -> tuple[str, str, int] | None:
        """A parameter of layers on both sides of a cut, under both names, and the cut."""
        holder: dict[nn.Parameter, tuple[int, str]] = {}
        for index, (name, layer) in enumerate(self.deferred.skeleton.named_children()):
            for path, parameter in layer.named_parameters(name):
                first, before = holder.setdefault(parameter, (index, path))
                between = [cut for cut in cuts if first < cut <= index]
                if between:
                    return before, path, between[0]
        return None


_UNTIE = (
    "no cut can avoid that: untie them, or train replicas of the whole model (pipeline.replicas) "
    "instead of stages"
)


def _listed(cuts: Sequence[int]) -> str:
    shown = ", ".join(map(str, cuts[:8]))
    return shown if len(cuts) <= 8 else f"{shown}, ..., {cuts[-1]}"


def _batch(sample: Tensor) -> Tensor:
    return sample.expand(_SAMPLES, *sample.shape).contiguous()


def _shape(x: Any) -> list[int] | str:
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
