"""What every kind of model answers for itself; its settings are one of the [model] sections."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from thinpipe.pipeline.loss import Objective
    from thinpipe.pipeline.models.build import StageModule


class ModelKind(BaseModel):
    """Settings of a model; kinds also have `layers`, `task`, `classes` and `from_run`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tag: ClassVar[Literal["shape", "folder", "own"]]
    """What the section is called in errors."""
    if TYPE_CHECKING:  # fields of some kinds, constants of others

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
            ValueError: there is no such range of layers, or files cannot be used.
        """

    def objective(self) -> "Objective":
        """What the head is trained for."""
        from thinpipe.pipeline.loss import Classification, NextToken

        return NextToken() if self.classes is None else Classification(self.classes)

    @property
    @abstractmethod
    def fresh_dropout(self) -> float:
        """Rate of dropout whose masks differ at every visit of a sample."""

    @property
    @abstractmethod
    def could_be_tied(self) -> bool:
        """Whether a cut makes two trained weights of what could be one."""

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's code, which brings samples of its own."""
        return self.tag == "own"

    @property
    def is_frozen(self) -> bool:
        """Whether embedding and head are."""
        return False

    @property
    def ties_uncut(self) -> bool:
        """Whether embedding and head are one weight where a stage holds all."""
        return self.tie_embeddings == "exact"

    @property
    def repeat_dropout(self) -> str:
        """What to set so that dropout drops the same at every visit."""
        return "set model.dropout to 0"

    @property
    def frozen_parts(self) -> Sequence[str]:
        """What all stages use, so that no device may have it alone."""
        return ()

    @abstractmethod
    def sample_shape(self, tokens: int) -> tuple[int, int]:
        """[T, D] of a sample of so many tokens at every cut."""

    def check_files(self) -> None:
        """Look at files without reading weights, unless a self-check is asked for.

        Raises:
            ValueError: they cannot be used; names file, tensor and remedy.
        """

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Check that the model can be cut there.

        Raises:
            ValueError: it cannot; names layer and shape.
        """

    def check_stages(self, stages: int) -> None:
        """Check that there are places to cut it into so many.

        Raises:
            ValueError: there are not; says why.
        """

    def check_tokens(self, tokens: int, tokenizer: str) -> None:
        """Check that it can take sequences of so many tokens.

        Raises:
            ValueError: it cannot; names the setting.
        """

    def check_masks(self, tokens: int) -> None:
        """Check that sequences of so many tokens may be packed and have prefixes.

        Raises:
            ValueError: they may not.
        """

    def check_packing(self) -> None:
        """Compare packed examples with single ones, if the model is to be checked by running it.

        Raises:
            ValueError: they differ.
        """

    def facts(self) -> dict[str, str]:
        """What must be equal on all hosts besides settings."""
        return {}

    def notices(self, *, cut: bool, ties: bool, tokenizer: str) -> list[str]:
        """What to tell before a run.

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
    @abstractmethod
    def longest(self) -> str:
        """The longest sequence, in words, and the remedy for a longer one."""

    def sample_shape(self, tokens: int) -> tuple[int, int]:
        return tokens, self.width

    def check_tokens(self, tokens: int, tokenizer: str) -> None:
        if tokens > self.context:
            raise ValueError(f"data.sequence_length = {tokens} is longer than {self.longest}")
        if tokenizer == "bytes" and self.vocab < 256:
            raise ValueError(f"model.vocab = {self.vocab}: bytes need 256")

    def notices(self, *, cut: bool, ties: bool, tokenizer: str) -> list[str]:
        if not (cut and ties and self.could_be_tied):
            return []
        return [
            "note: a cut separates embedding and head, so they are separate weights; "
            'model.tie_embeddings = "exact" keeps them equal for '
            f"{4 * self.vocab * self.width / 1e6:.3g} MB more each way per step"
        ]
