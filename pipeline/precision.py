"""In which precision a stage computes."""

from typing import Literal

Precision = Literal["fp32", "bf16"]
