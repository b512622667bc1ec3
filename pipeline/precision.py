"""In which precision a stage computes, and on what."""

from typing import Literal

Precision = Literal["fp32", "bf16"]
WeightFormat = Literal["fp32", "bf16", "nf4", "int8"]
"""In what matrices are held; the last two are for frozen ones."""
DeviceName = Literal["auto", "cpu", "cuda"]
