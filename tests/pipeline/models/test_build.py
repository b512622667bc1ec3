from pathlib import Path

from tests.huggingface import saved_model, section
from thinpipe.pipeline.models.build import stage_counts
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig


def test_an_embedding_that_a_cut_unties_counts_twice(tmp_path: Path) -> None:
    model = saved_model("gpt2", tmp_path)
    config = HuggingFaceConfig(**section("gpt2", tmp_path))
    embedding = model.get_input_embeddings().weight.numel()
    whole = stage_counts(config, ()).held
    assert stage_counts(config, ()) == (whole, whole)
    assert stage_counts(config, (2, 4)) == (whole + embedding, whole + embedding)


def test_frozen_parameters_are_held_and_not_trained(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("llama", tmp_path, lora={"rank": 2}))
    held, trained = stage_counts(config, (2,))
    assert held == stage_counts(config, ()).held
    assert 0 < trained < 0.5 * held
