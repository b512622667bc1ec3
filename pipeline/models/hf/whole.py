"""The whole model of a config, without memory or with given weights."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinpipe.pipeline.models.hf.families import Task
from thinpipe.pipeline.models.hf.init import initialise


def build_on_meta(transformers_config: Any, task: Task, *, untie: bool = False) -> Any:
    """The whole model on the meta device, with a config of its own, which stages change.

    `untie` its head if it is tied.

    Raises:
        ValueError: the library cannot build it.
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


def fill_whole(
    transformers_config: Any, task: Task, tensors: Mapping[str, Tensor], *, untie: bool
) -> Any:
    """A whole model with these weights, in evaluation mode; `untie` its head if it is tied.

    Raises:
        RuntimeError: tensors are missing, or of other shapes.
    """
    model = build_on_meta(transformers_config, task, untie=untie)
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty gave every parameter memory of its own
    initialise(model, seed=0, tied_to=())  # buffers that no file holds
    model.load_state_dict(dict(tensors))
    return model.eval()
