"""The whole model of a config, without values."""

import copy
from typing import Any

import torch
from torch import nn

from thinpipe.pipeline.models.hf.families import Task


def build_on_meta(transformers_config: Any, task: Task, *, untie: bool = False) -> Any:
    """The whole model on the meta device, with a config of its own, which stages change.

    `untie` its head if it is tied.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    factory: Any = AutoModelForCausalLM
    if task == "classification":
        factory = AutoModelForSequenceClassification
    settings = copy.deepcopy(transformers_config)
    if untie:
        settings.tie_word_embeddings = False
    with torch.device("meta"):
        model = factory.from_config(settings, dtype=torch.float32)
    model.tie_weights()  # transformers 5.0 leaves that out on the meta device
    return model


def build_empty(transformers_config: Any, task: Task, *, untie: bool) -> nn.Module:
    """The same on the CPU, with memory for the values of a state dict."""
    from thinpipe.pipeline.models.hf.init import initialise

    whole: Any = build_on_meta(transformers_config, task, untie=untie)
    whole.to_empty(device="cpu")
    whole.tie_weights()  # to_empty gave every parameter memory of its own
    initialise(whole, seed=0, tied_to=())  # buffers that no file holds
    return whole  # type: ignore[no-any-return]
