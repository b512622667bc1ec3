"""Traffic between the shards of a stage: the `[shards]` section."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

WeightRounding = Literal["shift", "stochastic", "nearest", "learned"]
GradientRounding = Literal["shift", "stochastic", "nearest"]


def _representable(bits: int) -> int:
    if not (2 <= bits <= 8 or bits in (16, 32)):
        raise ValueError(f"{bits} bits: use 2 to 8, or 16 (bf16) or 32 (fp32) without quantization")
    return bits


Bits = Annotated[int, AfterValidator(_representable)]


class ShardsConfig(BaseModel, frozen=True, extra="forbid"):
    """How `pipeline.shards` ranks hold a stage together.

    `method = "fsdp"` sends weights and gradients in 32 bits, or 16; `method = "qsdp"` quantizes
    them. `gather = "step"` gathers weights once per step and keeps them until its last backward;
    `"microbatch"` gathers them for every forward and backward, and keeps one block at a time.
    `weights = "differences"` quantizes what changed since the last gather instead of the values.
    Vectors, such as those of norms and biases, and tensors of fewer than `keep_below` values travel
    in 32 bits. `bucket` values share a scale. `coding = "zstd"` shortens messages where links are
    slow. `ranks_per_site` neighbours have fast links among each other: between sites every value is
    sent once, and inside them gradients are exact.
    """

    method: Literal["fsdp", "qsdp"] = "fsdp"
    gather: Literal["step", "microbatch"] = "step"
    weights: Literal["values", "differences"] = "values"
    weight_bits: Bits | None = None
    gradient_bits: Bits | None = None
    weight_rounding: WeightRounding = "shift"
    gradient_rounding: GradientRounding = "stochastic"
    bucket: int = Field(1024, ge=8)
    keep_below: int = Field(1024, ge=0)
    coding: Literal["none", "zstd"] = "none"
    ranks_per_site: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> "ShardsConfig":
        for name in ("weight_bits", "gradient_bits") if self.method == "fsdp" else ():
            bits = getattr(self, name)
            if bits is not None and bits < 16:
                raise ValueError(
                    f'{name} = {bits}: method = "fsdp" does not quantize; use 16 or 32 bits, or '
                    'method = "qsdp"'
                )
        unused = ("weight_rounding", "gradient_rounding", "bucket", "keep_below")
        for name in unused if self.method == "fsdp" else ():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f'{name} = {value!r}: method = "fsdp" does not quantize; remove it, or use '
                    'method = "qsdp"'
                )
        if self.weights == "values":
            return self
        if self.bits_of("weight") >= 16:
            raise ValueError(
                f'weights = "differences" with {self.bits_of("weight")} bits: values are exact '
                'then; use method = "qsdp" with weight_bits of 2 to 8, or weights = "values"'
            )
        if self.gather == "microbatch":
            raise ValueError(
                'weights = "differences" keeps all gathered weights between steps, and gather = '
                '"microbatch" holds one block at a time; use gather = "step"'
            )
        return self

    def bits_of(self, what: Literal["weight", "gradient"]) -> int:
        given = self.weight_bits if what == "weight" else self.gradient_bits
        return given or (32 if self.method == "fsdp" else 8)
