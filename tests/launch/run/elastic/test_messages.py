"""Messages of two ranks: each piece costs a round trip, so many small tensors share one."""

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
