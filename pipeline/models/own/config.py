"""Settings of a model of the user's own, and what can be known of it without values."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import PrivateAttr, ValidationInfo, model_validator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from thinpipe.pipeline.batch import Batch, PyTree, Samples
from thinpipe.pipeline.models.kind import ModelKind
from thinpipe.pipeline.models.own.example import SAMPLES, Example, Functions, samples_like

if TYPE_CHECKING:
    from thinpipe.pipeline.loss import Objective
    from thinpipe.pipeline.models.own.deferred import DeferredModel
    from thinpipe.pipeline.models.own.forward import Cutting
    from thinpipe.pipeline.models.own.stage import ForwardStage, OwnStage


class OwnModelConfig(ModelKind):
    """A model of one's own, as a function returns it.

    An `nn.Sequential` is cut between its layers, another module between the blocks of a list.

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
    _tokens: dict[str, int] = PrivateAttr(default_factory=dict)
    _checked: set[tuple[int, ...]] = PrivateAttr(default_factory=set)

    @classmethod
    def of(
        cls, functions: Functions, *, program: Sequence[str] = (), **names: str | None
    ) -> "OwnModelConfig":
        """The settings of functions that are here already; `names` are only recorded."""
        context = {"functions": functions}
        return cls.model_validate({**names, "program": program}, context=context)

    @model_validator(mode="after")
    def _take_given(self, info: ValidationInfo) -> Self:
        """Functions of the validation's context are taken in place of those that are named."""
        if info.context is not None:
            self._functions = info.context.get("functions")
        return self

    def with_example(self, example: Example) -> Self:
        config = self.model_copy()
        for known in ("outputs", "cutting"):
            config.__dict__.pop(known, None)
        config._example, config._tokens, config._checked = example, {}, set()
        return config

    @property
    def _where(self) -> str:
        """What messages begin with."""
        return f'model.factory = "{self.factory}"'

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
            ValueError: it cannot be built so, or has nothing that it could be cut between.
        """
        from thinpipe.pipeline.models.own.deferred import DeferredModel

        deferred = DeferredModel(self.functions.make, self._where)
        model = deferred.skeleton
        if isinstance(model, nn.Sequential) and not len(model):
            raise ValueError(
                f"{self._where}: returned an nn.Sequential without layers; give it some"
            )
        return deferred

    @cached_property
    def path(self) -> str | None:
        """The blocks of a module with a forward of its own; None of an `nn.Sequential`."""
        from thinpipe.pipeline.models.own.forward import find_blocks

        model = self.deferred.skeleton
        if type(model).forward is nn.Sequential.forward:
            return None
        return find_blocks(model, self._where)

    @cached_property
    def cutting(self) -> "Cutting":
        """How a module with a forward of its own is cut."""
        from thinpipe.pipeline.models.own.forward import trace

        assert self.path is not None, "it has a forward of its own"
        x = samples_like(self.example.x)
        return trace(self.deferred.skeleton, self.path, x, self._where)

    def whole_parameters(self, *, cut: bool) -> Mapping[str, nn.Parameter]:
        return dict(self.deferred.skeleton.named_parameters())

    @property
    def with_inputs(self) -> bool:
        return self.path is not None

    def adapted(self, batch: Batch) -> Batch:
        """Sequential layers take one tensor, however it came."""
        if self.path is not None or isinstance(batch.inputs_BT, Tensor):
            return batch
        inputs = tree_leaves(batch.inputs_BT)
        if len(inputs) != 1:
            raise ValueError(
                f"{self._where}: an nn.Sequential takes one input, and samples have {len(inputs)}; "
                "return a module whose forward takes them by these names"
            )
        return replace(batch, inputs_BT=inputs[0])

    def tokens_of(self, inputs: PyTree) -> int:
        shapes = [tuple(leaf.shape[1:]) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        key = repr(shapes)
        if key not in self._tokens:
            batch = Batch(inputs, self.example.target, torch.empty(0))
            example = Example.of(replace(batch, targets=None))
            shape = self.with_example(example).usual_shape
            self._tokens[key] = 1 if shape is None else shape[0]
        return self._tokens[key]

    @cached_property
    def names(self) -> list[str]:
        path = self.path or ""
        inside = self.deferred.skeleton.get_submodule(path)
        return [f"{path}.{name}".lstrip(".") for name, _ in inside.named_children()]

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
                f"{self._where}: sizes of messages follow from the data, which are not loaded here"
            )
        return self._example

    @cached_property
    def outputs(self) -> list[Any]:
        """Every layer's output for two samples, on the meta device.

        Raises:
            ValueError: a layer fails without values, or does not return a tensor.
        """
        if self.path is not None:
            hidden = [one.leaves[one.hidden] for one in self.cutting.returned]
            return [*hidden[:-1], self.cutting.outputs]
        x, found = samples_like(self.example.x), []
        for index, (name, layer) in enumerate(self.deferred.skeleton.named_children()):
            which = f'{self._where}: layer {index} ("{name}", {type(layer).__name__})'
            try:
                with torch.no_grad():
                    x = layer(x)
            except Exception as error:
                shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"{which} fails for an input of shape {shape} on the meta device, where sizes "
                    f"of messages are computed: {type(error).__name__}: {error}; make its input "
                    "fit, and let it not look at values of tensors"
                ) from error
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"{which} returns {type(x).__name__}; a stage sends one tensor: return one"
                )
            found.append(x)
        return found

    @property
    def _shapes(self) -> Mapping[int, tuple[int, int] | None]:
        """[T, D] of a sample at every cut; None if what crosses it is something else."""
        return {
            cut: (y.shape[1], y.shape[2])
            if y.ndim == 3 and len(y) == SAMPLES and y.is_floating_point()
            else None
            for cut, y in enumerate(self.outputs[:-1], start=1)
        }

    @cached_property
    def structure(self) -> str:
        """A model's identity, in words and by a digest of what its state dict holds."""
        state = self.deferred.skeleton.state_dict()
        text = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()])
        numel = sum(parameter.numel() for parameter in self.deferred.skeleton.parameters())
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{self.layers} layers, {numel:,} parameters, {digest[:16]}"

    def facts(self) -> dict[str, str]:
        return {"structure": self.structure}

    def build(
        self, first: int, stop: int, *, seed: int, device: torch.device | str
    ) -> "OwnStage | ForwardStage":
        from thinpipe.pipeline.models.own.stage import OwnStage, absent, as_stage

        if self.path is None:
            return OwnStage(self, first, stop, seed=seed, device=device)
        skeleton = self.deferred.skeleton
        constants = absent(skeleton, self.cutting, first, stop)
        (whole,) = self.deferred.fill([skeleton], seed=seed, device=device, constants=constants)
        return as_stage(whole, self.cutting, first, stop)

    def module_for(self, _: Mapping[str, Tensor]) -> nn.Module:
        return self.functions.make()

    def objective(self) -> "Objective":
        if self.functions.loss is None:
            return super().objective()
        from thinpipe.pipeline.models.own.loss import OwnLoss

        return OwnLoss(self.functions.loss, self.functions.count, self.outputs[-1])

    def sample_shape(self, tokens: int) -> tuple[int, int]:
        tokens, width = self.usual_shape or (1, 1)  # a model that cannot be cut sends nothing
        longest = None if self._example is None else self._example.longest
        return longest or tokens, width

    def made_up(
        self, first: int, shape: torch.Size, *, device: torch.device
    ) -> tuple[Tensor, PyTree, Samples]:
        def zeros(leaf: Tensor) -> Tensor:
            return torch.zeros(shape[0], *leaf.shape, dtype=leaf.dtype, device=device)

        inputs, targets = (tree_map_only(Tensor, zeros, part) for part in self.example[:2])
        ids_B = torch.arange(shape[0], device=device)
        x = ids_B if self.with_inputs else inputs
        if first > 0:
            x = zeros(self.outputs[first - 1][0])
        samples = Samples(ids_B, given=inputs if self.with_inputs else None)
        return (x.normal_() if x.is_floating_point() else x), targets, samples

    def cut_places(self, stages: int) -> Sequence[int]:
        self.check_stages(stages)
        return self.places

    @property
    def repeat_dropout(self) -> str:
        return "set the rates of dropout layers to 0"

    @property
    def fresh_dropout(self) -> float:
        kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
        modules = self.deferred.skeleton.modules()
        return max((m.p for m in modules if isinstance(m, kinds)), default=0.0)

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Also without samples; then not the sizes of messages."""
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
        if self.path is not None and tuple(cuts) not in self._checked:
            from thinpipe.pipeline.models.own.forward_check import check_cuts

            where = f"{self._where}, pipeline.cuts = {list(cuts)}"
            check_cuts(self.deferred, self.cutting, self.example.inputs, cuts, where=where)
            self._checked.add(tuple(cuts))
        shapes = self._shapes
        for cut in cuts:
            if shapes[cut] is None or shapes[cut] != shapes[cuts[0]]:
                raise ValueError(self._cannot_cut(cut, cuts))

    def check_stages(self, stages: int) -> None:
        """Only where samples are known."""
        if self._example is None or stages - 1 <= len(self.places):
            return
        where = f"pipeline.stages = {stages}: the model can be cut in {len(self.places)} places"
        shared = self._shared(range(1, self.layers))
        if shared is not None:
            before, after, _ = shared
            why = f"only, as {before} and {after} are one parameter, which no cut may divide"
            remedy = "untie them, or use fewer stages" if self.places else _UNTIE
            raise ValueError(f"{where} {why}; {remedy}")
        reason = next(iter(self._never.values()), None)
        why = f", as {reason}" if reason else " only, where messages are equally long"
        raise ValueError(f"{where}{why}; use at most {len(self.places) + 1}")

    def _cannot_cut(self, cut: int, cuts: Sequence[int]) -> str:
        y, usual = self.outputs[cut - 1], self.usual_shape
        remedy = "let layers between cuts return [samples, tokens, width]"
        if usual:
            where = [cut for cut, shape in self._shapes.items() if shape == usual]
            remedy = f"cut where it is {list(usual)} per sample: before layers {_listed(where)}"
        return (
            f"pipeline.cuts = {list(cuts)}: layer {cut - 1} returns {y.dtype} of shape "
            f"{list(y.shape)} for {SAMPLES} samples; what crosses cuts must be floats of shape "
            f"[samples, tokens, width], the same at every cut; {remedy}"
        )

    @property
    def usual_shape(self) -> tuple[int, int] | None:
        """[T, D] of a sample at most places between layers; None if it can be cut nowhere."""
        shapes = Counter(shape for shape in self._shapes.values() if shape is not None)
        return shapes.most_common(1)[0][0] if shapes else None

    @property
    def places(self) -> list[int]:
        """Where it can be cut, all with messages of the usual shape."""
        shapes, usual = self._shapes, self.usual_shape
        return [cut for cut in self._untied_places if shapes[cut] == usual]

    @property
    def _untied_places(self) -> list[int]:
        places = range(1, self.layers)
        return [cut for cut in places if cut not in self._never and not self._shared([cut])]

    @property
    def _never(self) -> Mapping[int, str]:
        """Where its forward keeps it from being cut, and why."""
        return {} if self.path is None else self.cutting.why_not

    def _shared(self, cuts: Sequence[int]) -> tuple[str, str, int] | None:
        """A parameter of layers on both sides of a cut, under both names, and the cut."""
        holder: dict[nn.Parameter, tuple[int, str]] = {}
        for index, name in enumerate(self.names):
            layer = self.deferred.skeleton.get_submodule(name)
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
