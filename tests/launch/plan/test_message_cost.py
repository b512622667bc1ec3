"""Names of settings."""

import pytest

from thinpipe.aqsgd.config import AqsgdConfig, AutoConfig
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.plan.message_cost import describe
from thinpipe.pipeline.config import DirectConfig, RawConfig, StatelessConfig


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (RawConfig(format="bf16"), "raw bf16"),
        (AqsgdConfig(bits=3), "aqsgd 3-bit"),
        (AutoConfig(bits=2), "auto 2-bit"),
        (DirectConfig(bits=8, coding="zstd"), "direct 8-bit zstd"),
        (AqsgdConfig(bits=4, rate=0.5, coding="zstd"), "aqsgd rate 0.5"),
        (AqsgdConfig(bits=4, rate=2.0, coding="rans"), "aqsgd rate 2 rans"),
        (StatelessConfig(bits=5), "stateless 5-bit"),
        (StatelessConfig(bits=4, coding="auto"), "stateless 4-bit auto"),
    ],
)
def test_settings_have_names(spec: Spec, name: str) -> None:
    assert describe(spec) == name
