"""In which precision a stage computes, and on what."""

from typing import Literal

Precision = Literal["fp32", "bf16"]
WeightFormat = Literal["fp32", "bf16", "nf4", "int8"]
"""In what frozen weights are held."""
DeviceName = Literal["auto", "cpu", "cuda"]
