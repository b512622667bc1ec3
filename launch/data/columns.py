"""What the fields of a row mean, which decides the kind of samples."""

from typing import Literal, Self

import pydantic
from pydantic import BaseModel, model_validator

Field = str | int
"""A name, or the number of a column (from 0) in a TSV file without a header."""
Fields = Field | tuple[Field, ...]
"""A field, or several whose texts are joined by blank lines; all but the first may be blank."""
Kind = Literal["text", "labelled", "instructions"]


class RowFields(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Fields are names, or numbers of columns in TSV files without a header.

    `text_field` alone is running text; with `label_field` (and `pair_field`, a second text) it is
    classified, `labels` naming the classes in order. `prompt_field` and `response_field` are
    instruction data; several prompt fields are joined by blank lines. `messages_field` holds
    conversations. `chat_template` writes both out: "tokenizer" is the tokenizer's own, "plain" one
    of headings, anything else a file of Jinja; without it prompts and responses are plain text.
    `loss_on` says which answers of a conversation are learnt, "all" every token.
    `objective = "prefix"` makes attention bidirectional within a prompt. `packing` puts several
    examples into a sequence, or whole documents of text, which do not see each other.
    `document_marks` are tokens between documents of text: those of the tokenizer, an end mark
    alone, or none.
    """

    text_field: Field | None = None
    pair_field: Field | None = None
    label_field: Field | None = None
    labels: tuple[str, ...] | None = pydantic.Field(default=None, min_length=2)
    prompt_field: Fields | None = None
    response_field: Field | None = None
    messages_field: Field | None = None
    chat_template: str | None = pydantic.Field(default=None, min_length=1)
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    objective: Literal["causal", "prefix"] = "causal"
    packing: bool | None = None
    document_marks: Literal["tokenizer", "end", "none"] = "tokenizer"

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
            names: tuple[str, ...] = ("text_field", "pair_field", "label_field", "labels")
            if self.messages_field is not None:
                names += ("prompt_field", "response_field")
            only = "prompts and responses" if self.messages_field is None else "conversations"
            self._reject((*names, "document_marks"), f"only {only} are read; remove it")
            return self
        if self.text_field is None:
            self._reject(("label_field",), "labels belong to a text; set text_field")
        if self.kind == "text":
            remedy = "this belongs to classification; set text_field and label_field"
            self._reject(("pair_field", "labels"), remedy)
        else:
            self._reject(("packing", "document_marks"), "labelled texts stand alone; remove it")
        remedy = "this belongs to instruction data; set prompt_field and response_field, or "
        self._reject(("objective", "chat_template", "loss_on"), f"{remedy}messages_field")
        return self

    @property
    def kind(self) -> Kind:
        if self.prompt_field is not None or self.messages_field is not None:
            return "instructions"
        return "text" if self.label_field is None else "labelled"

    @property
    def packs(self) -> bool:
        """Whether several examples, or whole documents, share a sequence."""
        return self.kind == "instructions" if self.packing is None else self.packing

    @property
    def prompt_fields(self) -> tuple[Field, ...]:
        if self.prompt_field is None:
            return ()
        return self.prompt_field if isinstance(self.prompt_field, tuple) else (self.prompt_field,)

    @property
    def fields(self) -> list[Field]:
        named = (self.text_field, self.pair_field, self.label_field, *self.prompt_fields)
        return [f for f in (*named, self.response_field, self.messages_field) if f is not None]

    @property
    def running_field(self) -> Field:
        """The field of running text; files without rows have none."""
        return "text" if self.text_field is None else self.text_field

    @property
    def optional_fields(self) -> tuple[Field, ...]:
        """Fields that rows may have: what a system says, and tools, besides a conversation."""
        return () if self.messages_field is None else ("system", "tools")

    def _reject(self, names: tuple[str, ...], remedy: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != RowFields.model_fields[name].default:
                raise ValueError(f"{name} = {value!r}: {remedy}")
