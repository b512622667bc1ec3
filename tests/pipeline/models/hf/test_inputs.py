"""Batches of one's own for a folder's model are what its own forward would make of them."""

import pytest
import torch
import torch.nn.functional as F

from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.loss import NextToken
from thinpipe.pipeline.models.hf.inputs import from_arguments

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
MASK = (IDS > 0).long()
LABELS = torch.where(IDS > 0, IDS, -100)
ARGUMENTS = {"input_ids": IDS, "attention_mask": MASK}


def adapted(inputs: object, targets: torch.Tensor, *, tokens: bool = True) -> Batch:
    batch = Batch(inputs, targets, torch.arange(len(IDS)))
    return from_arguments(batch, predicts_tokens=tokens, context=8)


def test_the_loss_is_that_of_the_librarys_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **shape)).eval()
    batch = adapted(ARGUMENTS, LABELS)
    with torch.no_grad():
        expected = model(**ARGUMENTS, labels=LABELS).loss
        logits = model(batch.inputs_BT, attention_mask=batch.mask_BT).logits
    objective = NextToken()
    assert batch.mask_BT is not None
    assert objective.count(batch.targets) == 4
    found = objective.loss_sum(logits, batch.targets) / objective.count(batch.targets)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_ids_alone_come_with_targets_that_are_shifted_and_labels_of_samples_stay() -> None:
    batch = adapted(IDS, LABELS)
    assert batch.targets is LABELS
    assert batch.mask_BT is None
    classes = adapted({**ARGUMENTS, "token_type_ids": MASK}, torch.tensor([1, 0]), tokens=False)
    assert classes.targets.tolist() == [1, 0]
    assert classes.types_BT is MASK
    assert adapted({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, LABELS).samples.plain


def test_what_it_would_not_be_given_is_rejected() -> None:
    with pytest.raises(ValueError, match="samples have position_ids; give a model of a folder inp"):
        adapted({**ARGUMENTS, "position_ids": IDS}, LABELS)
    with pytest.raises(ValueError, match="samples have a tuple; give"):
        adapted((IDS, MASK), LABELS)
    with pytest.raises(ValueError, match="samples have no input_ids"):
        adapted({"attention_mask": MASK}, LABELS)
    with pytest.raises(ValueError, match="a batch of 12 tokens is longer than the 8 that"):
        adapted(F.pad(IDS, (0, 8)), LABELS)
