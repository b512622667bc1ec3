"""Copies of a state that training changes next."""

import torch

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint.contents import snapshot, without_rows


def test_a_copy_is_filled_again_where_it_fits_and_made_anew_elsewhere() -> None:
    state = {"w": torch.arange(4.0), "list": [torch.zeros(2), 3, (torch.ones(()),)], ROWS: [1]}
    first = snapshot(state)
    assert first[ROWS] is state[ROWS]  # rows are a copy already
    state["w"] += 1
    state["list"] = [torch.ones(3), 4]
    again = snapshot(state, without_rows(first))
    assert again["w"].tolist() == [1, 2, 3, 4]
    assert again["w"].data_ptr() == first["w"].data_ptr()
    assert again["list"][0].tolist() == [1, 1, 1]
    assert again["list"][1:] == [4]
    state["w"] += 1
    assert again["w"].tolist() == [1, 2, 3, 4]
    longer = snapshot({"list": [torch.zeros(3), torch.zeros(1), 5]}, without_rows(again))
    assert [type(item) for item in longer["list"]] == [torch.Tensor, torch.Tensor, int]
    assert snapshot({"w": [1]}, again) == {"w": [1]}
