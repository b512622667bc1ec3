"""Batches of the user's own for a Hugging Face model, as its own forward would be called.

Axes: B samples, T tokens.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinpipe.pipeline.batch import IGNORED_TARGET, Batch

_KNOWN = ("input_ids", "attention_mask", "token_type_ids")


def from_arguments(batch: Batch, *, predicts_tokens: bool, context: int) -> Batch:
    """A batch whose inputs are token ids, or the named arguments of a forward.

    With named arguments, targets are labels as transformers has them: those of tokens stand at the
    tokens themselves, and are shifted here. With ids alone they are what follows each token.

    Raises:
        ValueError: there are other arguments, or too many tokens.
    """
    inputs = batch.inputs_BT
    alone = isinstance(inputs, Tensor)
    if alone:
        inputs = {"input_ids": inputs}
    unknown = sorted(set(inputs) - set(_KNOWN)) if isinstance(inputs, Mapping) else ["a tuple"]
    if unknown or "input_ids" not in inputs:
        raise ValueError(
            f"samples have {', '.join(unknown) or 'no input_ids'}; give a model of a folder "
            f"{', '.join(_KNOWN)} and labels, or (input_ids, targets)"
        )
    ids_BT, mask_BT = inputs["input_ids"], inputs.get("attention_mask")
    if ids_BT.shape[1] > context:
        raise ValueError(
            f"a batch of {ids_BT.shape[1]} tokens is longer than the {context} that the model was "
            "made for; truncate samples, for example in the collate function"
        )
    if alone:
        return batch
    targets = batch.targets
    if predicts_tokens:
        last_B1 = torch.full_like(targets[:, :1], IGNORED_TARGET)
        targets = torch.cat([targets[:, 1:], last_B1], 1)
    padded = mask_BT is not None and not bool(mask_BT.all())
    return replace(
        batch,
        inputs_BT=ids_BT,
        targets=targets,
        mask_BT=mask_BT.to(torch.int64) if padded else None,
        types_BT=inputs.get("token_type_ids"),
    )
