"""What a row says of fields that it does not have as they should be."""

import pytest

from thinpipe.launch.data.rows import Row, RowError


def test_missing_fields_and_values_that_are_not_text_are_named() -> None:
    """JSON can escape one surrogate of a pair; the pair is one character."""
    row = Row("a.jsonl:1", {"a": None, "b": 3, "c": " ", "e": "ab\ud800c", "f": "\U0001f600"})
    for field, reason in (
        ("a", "field 'a' is null"),
        ("d", "no field 'd'"),
        ("b", "field 'b' is int, not text"),
        ("c", "field 'c' is blank"),
        ("e", "field 'e' holds an unpaired surrogate"),
    ):
        with pytest.raises(RowError, match=reason):
            row.text(field)
    assert row.text("f") == "\U0001f600"
