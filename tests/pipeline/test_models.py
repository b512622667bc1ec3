from pathlib import Path

from pipeline.huggingface_config import HuggingFaceConfig
from pipeline.models import exchanged_count, parameter_count
from tests.huggingface import saved_model, section


def test_an_embedding_that_a_cut_unties_is_exchanged_twice(tmp_path: Path) -> None:
    model = saved_model("gpt2", tmp_path)
    config = HuggingFaceConfig(**section("gpt2", tmp_path))
    embedding = model.get_input_embeddings().weight.numel()
    assert exchanged_count(config, ()) == parameter_count(config)
    assert exchanged_count(config, (2, 4)) == parameter_count(config) + embedding


def test_frozen_parameters_are_not_exchanged(tmp_path: Path) -> None:
    saved_model("llama", tmp_path)
    config = HuggingFaceConfig(**section("llama", tmp_path, lora={"rank": 2}))
    assert 0 < exchanged_count(config, (2,)) < 0.5 * parameter_count(config)
