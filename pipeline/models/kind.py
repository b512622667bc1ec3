"""Common base of model kinds; their settings are the [model] section."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

if TYPE_CHECKING:
    from thinpipe.pipeline.batch import Batch, PyTree, Samples
    from thinpipe.pipeline.loss import Objective
    from thinpipe.pipeline.models.build import StageModule
    from thinpipe.pipeline.models.own.example import Example


Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What a classification head is trained for, as transformers calls it (`problem_type`)."""
Checkpointing = bool | Annotated[int, Field(ge=1)]
"""Whether activations are computed again during backward; a number n: those of every nth block."""


class ModelKind(BaseModel, frozen=True, extra="forbid"):
    """Settings of a model; kinds also have `layers`, `task`, `classes` and `from_run`."""

    tag: ClassVar[Literal["shape", "folder", "own"]]
    """Name of the section in errors."""
    if TYPE_CHECKING:  # fields of some kinds, constants of others

        @property
        def layers(self) -> int: ...

        @property
        def classes(self) -> int | None: ...

        @property
        def tie_embeddings(self) -> Literal["untied", "exact"]: ...

    @abstractmethod
    def build(
        self, first: int, stop: int, *, seed: int, device: torch.device | str
    ) -> "StageModule":
        """The stage that holds blocks `first` to `stop - 1`, with only its own weights.

        Raises:
            ValueError: files cannot be used.
        """

    def objective(self) -> "Objective":
        from thinpipe.pipeline.loss import Classification, NextToken, Regression, SeveralLabels

        if self.classes is None:
            return NextToken()
        kinds: dict[Problem, Callable[[], Objective]] = {
            "single_label_classification": Classification,
            "multi_label_classification": SeveralLabels,
            "regression": Regression,
        }
        return kinds[self.problem]()

    @property
    def problem(self) -> Problem:
        return "single_label_classification"

    @property
    def token_types(self) -> int:
        """How many types of token it tells apart, such as the texts of a pair."""
        return 1

    @property
    @abstractmethod
    def fresh_dropout(self) -> float:
        """Rate of dropout whose masks differ at every visit of a sample."""

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's code, which brings samples of its own."""
        return self.tag == "own"

    def whole_parameters(self, *, cut: bool) -> "Mapping[str, nn.Parameter]":
        """What is trained of the whole model, by name, without values; if it is `cut`, a head that
        is tied to the embedding is a parameter of its own.
        """
        bounds = (0, self.layers - 1, self.layers) if cut and self.layers > 1 else (0, self.layers)
        stages = [self.build(*ends, seed=0, device="meta") for ends in pairwise(bounds)]
        named = [item for stage in stages for item in stage.named_parameters()]
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def with_inputs(self) -> bool:
        """Whether every stage needs the inputs, and not the first alone."""
        return False

    def adapted(self, batch: "Batch") -> "Batch":
        """Samples of the user's own as this model takes them."""
        return batch

    def tokens_of(self, inputs: Any) -> int:
        """T of the hidden states that follow from a batch's inputs."""
        return int(inputs.shape[1])

    @property
    def trains_in_bf16(self) -> bool:
        """Whether matrices are trained in bf16."""
        return False

    @property
    def quantizes(self) -> bool:
        """Whether it holds codes of weights, and reads values from them in each product."""
        return False

    @property
    def is_frozen(self) -> bool:
        """Whether embedding and head are."""
        return False

    @property
    def reads_frozen(self) -> bool:
        """Whether frozen weights are read from files at every start, and need no other copy."""
        return False

    @property
    def libraries(self) -> int:
        """How many large ones a rank imports for it."""
        return 0

    def held_nbytes(self, stage: nn.Module) -> int:
        """Bytes of the weights of a stage that was built on the meta device."""
        return sum(parameter.nbytes for parameter in stage.parameters())

    @property
    def tied_names(self) -> Mapping[str, str]:
        """What is one weight with another where it is tied, by the names in state dicts."""
        return {}

    @property
    def ties_uncut(self) -> bool:
        """Whether embedding and head are one weight where a stage holds all."""
        return self.tie_embeddings == "exact"

    @property
    def repeat_dropout(self) -> str:
        """Remedy that makes dropout drop the same in every epoch."""
        return "set model.dropout to 0"

    @property
    def frozen_parts(self) -> Sequence[str]:
        """Parts that all stages use, so that no device may have them alone."""
        return ()

    @abstractmethod
    def sample_shape(self, tokens: int) -> tuple[int, int]:
        """[T, D] of a sample of so many tokens at every cut."""

    @property
    def token_limit(self) -> int | None:
        """The vocabulary's size; None if samples need not be tokens."""
        return None

    def with_example(self, _: "Example") -> Self:
        """The same, for samples like this one: messages of a custom model have sizes then."""
        return self

    @abstractmethod
    def made_up(
        self, first: int, shape: torch.Size, *, device: torch.device
    ) -> "tuple[Tensor, PyTree, Samples]":
        """Inputs of a block, targets and samples, for a microbatch of that shape."""

    def cut_places(self, _: int) -> Sequence[int]:
        """Where it can be cut into so many stages."""
        return range(1, self.layers)

    def check_files(self) -> None:
        """Look at files without reading weights, unless a self-check is asked for."""

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Check that the model can be cut there."""

    def check_stages(self, stages: int) -> None:
        """Check that there are places to cut it into so many."""

    def check_tokens(self, tokens: int, tokenizer: str) -> None:
        """Check that it can take sequences of so many tokens."""

    def check_masks(self, tokens: int) -> None:
        """Check that sequences of so many tokens may be packed and have prefixes."""

    def check_packing(self) -> None:
        """Compare packed examples with single ones, if the model is to be checked by running it."""

    def recomputes(self, _: int) -> bool:
        """Whether this block's activations are computed again during backward."""
        return False

    def facts(self) -> dict[str, str]:
        """Facts that must be equal on all hosts besides settings."""
        return {}

    def changed_since(self, _: Mapping[str, str]) -> str | None:
        """Which of its files differ from those of such facts, in words."""
        return None

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stages' tensors as a state dict of the whole model."""
        return dict(tensors)

    def module_for(self, _: Mapping[str, Tensor]) -> nn.Module:
        """The whole model as an ordinary module, on the CPU, which takes that state dict."""
        return self.build(0, self.layers, seed=0, device="cpu")

    @property
    def caches_keys(self) -> bool:
        """Whether that module can keep keys and values of earlier tokens."""
        return False

    def longest_text(self, trained: int) -> int:
        """The most tokens it can take, if it was trained on sequences of so many."""
        return trained

    def notices(self, *, cut: bool, ties: bool, tokenizer: str) -> list[str]:
        """Notices before a run.

        `cut`: whether the model is cut; `ties`: whether copies of a tied weight would stay equal.
        """
        return []


class TokenModel(ModelKind):
    """A model of tokens, with an embedding and a head."""

    if TYPE_CHECKING:

        @property
        def width(self) -> int: ...

        @property
        def vocab(self) -> int: ...

        @property
        def context(self) -> int: ...

        @property
        def activation_checkpointing(self) -> Checkpointing: ...

    @property
    @abstractmethod
    def could_be_tied(self) -> bool:
        """Whether a cut makes two trained weights of what could be one."""

    def recomputes(self, block: int) -> bool:
        every = int(self.activation_checkpointing)
        return every > 0 and block % every == 0

    @property
    @abstractmethod
    def longest(self) -> str:
        """The longest sequence, in words, and the remedy for a longer one."""

    @property
    def token_limit(self) -> int:
        return self.vocab

    def longest_text(self, _: int) -> int:
        return self.context

    def sample_shape(self, tokens: int) -> tuple[int, int]:
        return tokens, self.width

    def made_up(
        self, first: int, shape: torch.Size, *, device: torch.device
    ) -> "tuple[Tensor, PyTree, Samples]":
        from thinpipe.pipeline.batch import Samples

        samples, tokens, _ = shape
        tokens_BT = torch.randint(min(256, self.vocab), (samples, tokens), device=device)
        x = tokens_BT if first == 0 else torch.randn(shape, device=device)
        targets = tokens_BT
        if self.problem != "single_label_classification":
            targets = torch.zeros(samples, self.classes or 1, device=device)
        elif self.classes is not None:
            targets = torch.zeros(samples, dtype=torch.int64, device=device)
        return x, targets, Samples(torch.arange(samples, device=device))

    def check_tokens(self, tokens: int, tokenizer: str) -> None:
        if tokens > self.context:
            raise ValueError(f"data.sequence_length = {tokens} is longer than {self.longest}")
        if tokenizer == "bytes" and self.vocab < 256:
            raise ValueError(
                f"model.vocab = {self.vocab}: bytes need 256; raise it, or leave it out"
            )

    def notices(self, *, cut: bool, ties: bool, tokenizer: str) -> list[str]:
        if not (cut and ties and self.could_be_tied):
            return []
        return [
            "note: a cut separates embedding and head, so they are separate weights; "
            'model.tie_embeddings = "exact" keeps them equal for '
            f"{4 * self.vocab * self.width / 1e6:.3g} MB more each way per step"
        ]
