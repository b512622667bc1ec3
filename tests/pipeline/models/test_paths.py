"""Paths that a user wrote."""

import pytest

from thinpipe.pipeline.models.paths import user_path


def test_a_home_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(user_path("~/text.txt")) == "/home/somebody/text.txt"
    assert str(user_path("~root").parent) == "/"


@pytest.mark.parametrize("written", ["~nobody9/text.txt", "~nobody9"])
def test_a_home_that_is_not_known_is_named(written: str) -> None:
    with pytest.raises(ValueError, match=f"^{written}: the home folder of ~nobody9 is not known;"):
        user_path(written)
