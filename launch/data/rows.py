"""Rows of files and data sets: named or numbered fields, and where they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thinpipe.launch.data.columns import Field


class RowError(ValueError):
    """Why a row gives no document, in words that rows alike share."""

    value: str | None = None
    """What the row has instead, which others have not."""


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
            raise RowError(self.problem)
        found = self.fields.get(field)
        if found is None:
            raise RowError(
                f"field {field!r} is null" if field in self.fields else f"no field {field!r}"
            )
        if isinstance(found, str) and not is_utf8(found):
            raise RowError(f"field {field!r} holds an unpaired surrogate")
        return found

    def text(self, field: Field, *, blank: bool = False) -> str:
        """Return a field that must be text, and not blank unless that is allowed.

        Raises:
            RowError: it is something else.
        """
        found = self.value(field)
        if not isinstance(found, str):
            raise RowError(f"field {field!r} is {type(found).__name__}, not text")
        if not blank and not found.strip():
            raise RowError(f"field {field!r} is blank")
        return found


class Rows(Protocol):
    """Rows in order, read anew whenever they are iterated over; none stays in RAM."""

    name: str
    """What messages call them."""
    columns: Sequence[Field]
    """Fields that are known before a row is read; none of JSON, whose records may have any."""

    def __iter__(self) -> Iterator[Row]: ...

    def count(self) -> int:
        """How many there are, which may take as long as reading them."""


def is_utf8(text: str) -> bool:
    """Whether it has no unpaired surrogate, which JSON can hold, or an escaped byte is read as."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_nulls(value: Any) -> Any:
    """A value without keys that are null: Arrow gives a record of a list all keys of the others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
