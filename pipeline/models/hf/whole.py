"""The whole model of a config, without memory."""

import copy
from typing import Any

import torch

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
