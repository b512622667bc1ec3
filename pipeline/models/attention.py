"""Which tokens see which: causal or not, padding, packed examples, prefixes.

Every stage makes its own masks from what it knows of the samples; none crosses a link.

Axes: B samples, T tokens, Q asking tokens, K answering tokens.
"""

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples


def visible(
    samples: Samples | None, tokens: int, *, causal: bool, device: torch.device
) -> Tensor | None:
    """Boolean [B, 1, Q, K]: whether token q sees token k; None when `causal` says it all.

    A prefix token sees all of the prefix of its example (Tay et al., "UL2: Unifying Language
    Learning Paradigms", 2022). Padding is seen by nobody; a padding token sees at least itself, so
    that its softmax is defined.
    """
    if samples is None or samples.plain:
        return None
    prefix_BT, segments_BT, mask_BT = samples.prefix_BT, samples.segments_BT, samples.mask_BT
    home = samples.ids_B.device
    seen = torch.ones(len(samples.ids_B), tokens, tokens, dtype=torch.bool, device=home)
    if causal:
        seen = seen.tril()
    if prefix_BT is not None:
        seen |= (prefix_BT[:, :, None] != 0) & (prefix_BT[:, None, :] != 0)
    if segments_BT is not None:
        seen &= segments_BT[:, :, None] == segments_BT[:, None, :]
    if mask_BT is not None:
        seen &= mask_BT[:, None, :] != 0
    seen |= torch.eye(tokens, dtype=torch.bool, device=home)
    return seen[:, None].to(device)


def positions(samples: Samples | None, tokens: int, *, device: torch.device) -> Tensor:
    """Position of every token in its example: [T], or [B, T] where several are packed."""
    count_T = torch.arange(tokens, device=device if samples is None else samples.ids_B.device)
    if samples is None or samples.segments_BT is None:
        return count_T.to(device)
    segments_BT = samples.segments_BT
    starts_BT = torch.zeros_like(segments_BT, dtype=torch.int64)
    changed = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts_BT[:, 1:] = torch.where(changed, count_T[1:], 0)
    return (count_T - starts_BT.cummax(dim=1).values).to(device)
