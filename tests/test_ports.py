import itertools

import pytest

from tests import ports


def test_a_port_is_given_once_even_if_nothing_listens_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = ports.free_port()
    drawn = itertools.chain([first - ports._FIRST], itertools.count())
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: next(drawn))
    assert ports.free_port() != first
