"""What the fields of a row mean, which decides the kind of samples."""

from typing import Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, model_validator

Field = str | int
"""A name, or the number of a column (from 0) in a TSV file without a header."""
Kind = Literal["text", "labelled", "instructions"]


class RowFields(BaseModel):
    """Fields are names, or numbers of columns in TSV files without a header.

    `text_field` alone is running text; with `label_field` (and `pair_field`, a second text) it is
    classified, `labels` naming the classes in order; `prompt_field` and `response_field` are
    instruction data, where `objective = "prefix"` makes attention bidirectional within a prompt and
    `packing` puts several examples into a sequence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    text_field: Field | None = None
    pair_field: Field | None = None
    label_field: Field | None = None
    labels: tuple[str, ...] | None = pydantic.Field(default=None, min_length=2)
    prompt_field: Field | None = None
    response_field: Field | None = None
    objective: Literal["causal", "prefix"] = "causal"
    packing: bool = True

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError(
                f"prompt_field = {self.prompt_field!r}, response_field = {self.response_field!r}: "
                "instruction data needs both; set the other"
            )
        numbers = {isinstance(field, int) for field in self.fields}
        if len(numbers) > 1:
            raise ValueError(
                f"fields {self.fields}: some are names and some numbers of columns; use one kind"
            )
        if self.kind == "instructions":
            names = ("text_field", "pair_field", "label_field", "labels")
            self._refuse(names, "only prompts and responses are read; remove it")
            return self
        if self.text_field is None:
            self._refuse(("label_field",), "labels belong to a text; set text_field")
        if self.kind == "text":
            remedy = "this belongs to classification; set text_field and label_field"
            self._refuse(("pair_field", "labels"), remedy)
        remedy = "this belongs to instruction data; set prompt_field and response_field"
        self._refuse(("objective", "packing"), remedy)
        return self

    @property
    def kind(self) -> Kind:
        if self.prompt_field is not None:
            return "instructions"
        return "text" if self.label_field is None else "labelled"

    @property
    def fields(self) -> list[Field]:
        """The fields that rows must have; empty for plain text."""
        named = (self.text_field, self.pair_field, self.label_field)
        return [f for f in (*named, self.prompt_field, self.response_field) if f is not None]

    def _refuse(self, names: tuple[str, ...], remedy: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != RowFields.model_fields[name].default:
                raise ValueError(f"{name} = {value!r}: {remedy}")
