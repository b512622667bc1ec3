"""The [[boundary]] tables: how each direction of a cut is compressed."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from thinpipe.aqsgd.config import AqsgdConfig, GradientAqsgdConfig
from thinpipe.aqsgd.transform.config import GradientTransformConfig, TransformConfig
from thinpipe.pipeline.config import DirectConfig, GuardConfig, RawConfig, StatelessConfig


def _known_names(value: Any) -> Any:
    """Accept AC-SGD's names; settings given explicitly take precedence over what a name implies."""
    if not isinstance(value, Mapping):
        return value
    aliases: dict[Any, dict[str, Any]] = {
        "fixpoint": {"kind": "direct"},
        "delta": {"kind": "aqsgd"},
        "delta-lowbits": {"kind": "aqsgd", "memory": 8},
    }
    implied = aliases.get(value.get("kind"))
    return value if implied is None else {**implied, **value, "kind": implied["kind"]}


ForwardConfig = Annotated[
    AqsgdConfig | DirectConfig | RawConfig | StatelessConfig | TransformConfig,
    Field(discriminator="kind"),
    BeforeValidator(_known_names),
]
BackwardConfig = Annotated[
    GradientAqsgdConfig | DirectConfig | GradientTransformConfig | RawConfig | StatelessConfig,
    Field(discriminator="kind"),
    BeforeValidator(_known_names),
]
Spec = ForwardConfig | BackwardConfig


class BoundaryConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How a cut is compressed. Without `cut` it applies to every cut that has no table of its own.

    The names of AC-SGD are accepted too: `kind = "fixpoint"` is "direct", "delta" is "aqsgd" and
    "delta-lowbits" is "aqsgd" with `memory = 8`.
    """

    cut: int | None = None
    forward: ForwardConfig = AqsgdConfig()
    backward: BackwardConfig = DirectConfig()
    guard: GuardConfig = GuardConfig()


def boundary_at(boundaries: Sequence[BoundaryConfig], cut: int) -> BoundaryConfig:
    """The boundary of a cut: its own table, else the one without `cut`, else the default."""
    own = [boundary for boundary in boundaries if boundary.cut == cut]
    general = [boundary for boundary in boundaries if boundary.cut is None]
    return (own + general + [BoundaryConfig()])[0]
