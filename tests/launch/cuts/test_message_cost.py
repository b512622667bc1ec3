"""Names of settings."""

import pytest
import torch

from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.aqsgd.transform.config import GradientTransformConfig, TransformConfig
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.cuts.message_cost import measure_message
from thinpipe.pipeline.config import DirectConfig, RawConfig, StatelessConfig


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (RawConfig(format="bf16"), "raw bf16"),
        (AqsgdConfig(bits=3), "aqsgd 3-bit"),
        (DirectConfig(bits=8), "direct 8-bit"),
        (StatelessConfig(bits=5), "stateless 5-bit"),
        (TransformConfig(step=0.8), "transform step 0.8"),
    ],
)
def test_settings_have_names(spec: Spec, name: str) -> None:
    assert spec.words() == name


@pytest.mark.parametrize(
    ("spec", "direction", "bits"),
    [
        (TransformConfig(step=0.6), 0, 2.00),
        (TransformConfig(step=0.8), 0, 1.89),
        (GradientTransformConfig(step=0.6), 1, 2.00),
        (GradientTransformConfig(step=0.8), 1, 1.79),
    ],
)
def test_a_transform_takes_the_bits_that_were_measured(
    spec: Spec, direction: int, bits: float
) -> None:
    """At GPT-2's shape: benchmarks/results/transform_cpu_202611.md."""
    shape_BTD = torch.Size((4, 128, 256))
    message = measure_message(spec, shape_BTD, direction)
    assert 8 * message.nbytes / shape_BTD.numel() == pytest.approx(bits, rel=0.2)
