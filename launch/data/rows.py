"""Rows of files and data sets: named or numbered fields, and where they are."""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thinpipe.launch.data.columns import Field

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates of UTF-16; JSON can hold an unpaired one, UTF-8 cannot."""


class RowError(ValueError):
    """A row that cannot be used; rows alike share `reason`, the message says where and what."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One record; `where` is its location in error messages.

    One with a `problem`, such as damaged JSON, has no fields.
    """

    where: str
    fields: Mapping[Field, Any]
    problem: str | None = None

    def value(self, field: Field) -> Any:
        """Return a field.

        Raises:
            RowError: it is missing or null, or text with an unpaired surrogate; or the row has a
                problem.
        """
        if self.problem is not None:
            raise RowError(f"{self.where}: {self.problem}; correct or remove it", self.problem)
        found = self.fields.get(field)
        if found is None:
            if field in self.fields:
                reason = f"field {field!r} is null"
                raise RowError(f"{self.where}: {reason}; correct or remove the row", reason)
            among = f"among {list(self.fields)}" if self.fields else "in an empty record"
            raise RowError(
                f"{self.where}: no field {field!r} {among}; correct the row or the field's name in "
                "[data]",
                f"no field {field!r}",
            )
        surrogate = _SURROGATE.search(found) if isinstance(found, str) else None
        if surrogate is not None:
            raise RowError(
                f"{self.where}: field {field!r} holds {surrogate[0]!r} at {surrogate.start()}, an "
                "unpaired surrogate; correct or remove it",
                f"field {field!r} holds an unpaired surrogate",
            )
        return found

    def text(self, field: Field, *, blank: bool = False) -> str:
        """Return a field that must be text, and not blank unless that is allowed.

        Raises:
            RowError: it is something else.
        """
        found = self.value(field)
        if not isinstance(found, str):
            kind = type(found).__name__
            raise RowError(
                f"{self.where}: field {field!r} = {reprlib.repr(found)}: {kind}, not text; correct "
                "the row or the field's name in [data]",
                f"field {field!r} is {kind}, not text",
            )
        if not blank and not found.strip():
            raise RowError(
                f"{self.where}: field {field!r} = {found!r}: blank; correct the row",
                f"field {field!r} is blank",
            )
        return found


class Rows(Protocol):
    """Rows in order, read anew whenever they are iterated over; none stays in RAM."""

    columns: Sequence[Field]
    """Fields that are known before a row is read; none of JSON, whose records may have any."""

    def __iter__(self) -> Iterator[Row]: ...

    def count(self) -> int:
        """How many there are, which may take as long as reading them."""


def without_nulls(value: Any) -> Any:
    """A value without keys that are null: Arrow gives a record of a list all keys of the others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
