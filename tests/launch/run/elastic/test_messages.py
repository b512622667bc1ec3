"""Messages of two ranks: each piece costs a round trip, so many small tensors share one."""

import pytest
import torch
from torch import Tensor

from thinpipe.launch.run.elastic import messages
from thinpipe.launch.run.elastic.messages import receive_header, receive_tensors, send_message
from thinpipe.launch.run.weights import describe

PIECE_NBYTES = messages._PIECE_NBYTES


def test_tensors_come_as_they_were_in_few_pieces() -> None:
    shapes = [(7, 3), (0,), (), *[(5,)] * 60, (PIECE_NBYTES // 4 + 3,), (2, 2)]
    sent = {str(n): torch.randn(shape) for n, shape in enumerate(shapes)}
    sent["half"], sent["bits"] = torch.randn(9).bfloat16(), torch.tensor([True, False])
    header = {"tensors": [describe(name, tensor) for name, tensor in sent.items()]}
    moved = list[Tensor]()
    nbytes = send_message(lambda piece: moved.append(piece.clone()), header, sent.values())
    assert len(moved) == 2 + 3, "a length, a header, and what fits in three pieces"
    assert nbytes == sum(piece.numel() for piece in moved[1:])

    def receive(piece: Tensor) -> None:
        piece.copy_(moved.pop(0))

    found = receive_tensors(receive, receive_header(receive, 1 << 20), 2 * PIECE_NBYTES)
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_what_fits_is_filled_again_and_only_new_bytes_are_checked() -> None:
    sent = {"same": torch.randn(PIECE_NBYTES // 2), "grown": torch.randn(9), "other": torch.ones(3)}
    before = {"same": torch.zeros_like(sent["same"]), "grown": torch.zeros(8)}
    before["other"] = torch.zeros(3, dtype=torch.float64)
    moved = list[Tensor]()
    header = {"tensors": [describe(name, tensor) for name, tensor in sent.items()]}
    send_message(lambda piece: moved.append(piece.clone()), header, sent.values())

    def receive(piece: Tensor) -> None:
        piece.copy_(moved.pop(0))

    header = receive_header(receive, 1 << 20)
    with pytest.raises(ValueError, match="offers 48 bytes, where at most 47 can be"):
        receive_tensors(receive, header, 47, into=before)
    found = receive_tensors(receive, header, 48, into=before)
    assert [*found] == [*sent]
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    kept = {name: found[name].data_ptr() == before[name].data_ptr() for name in sent}
    assert kept == {"same": True, "grown": False, "other": False}
