"""What a row says of fields that it does not have as they should be."""

import pytest

from thinpipe.launch.data.rows import Row, RowError


def test_missing_fields_and_values_that_are_not_text_are_named() -> None:
    row = Row("a.jsonl:1", {"a": None, "b": 3, "c": " "})
    for field, message, reason in (
        ("a", r"a.jsonl:1: field 'a' is null", "field 'a' is null"),
        ("d", r"a.jsonl:1: no field 'd' among \['a', 'b', 'c'\]", "no field 'd'"),
        (
            "b",
            r"a.jsonl:1: field 'b' = 3: int, not text; correct the row or the field's name",
            "field 'b' is int, not text",
        ),
        ("c", r"field 'c' = ' ': blank", "field 'c' is blank"),
    ):
        with pytest.raises(RowError, match=message) as caught:
            row.text(field)
        assert caught.value.reason == reason


def test_an_unpaired_surrogate_is_named() -> None:
    """JSON can escape one surrogate of a pair; the pair is one character."""
    row = Row("a.jsonl:1", {"a": "ab\ud800c", "b": "\U0001f600"})
    assert row.value("b") == "\U0001f600"
    with pytest.raises(RowError, match=r"a\.jsonl:1: field 'a' holds '\\ud800' at 2"):
        row.value("a")
