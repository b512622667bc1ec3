"""In which precision a stage computes, and on what."""

from typing import Literal

Precision = Literal["fp32", "bf16"]
DeviceName = Literal["auto", "cpu", "cuda"]
