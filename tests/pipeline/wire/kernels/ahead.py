"""The CUDA kernels compiled without a GPU, and what each takes of a multiprocessor.

    python -m tests.pipeline.wire.kernels.ahead > tests/pipeline/wire/kernels/resources.json

A row of the table is a kernel; see `resources`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinpipe.pipeline.wire.kernels.gpu import hadamard, uniform

CAPABILITIES = (80, 86, 89, 90, 100)
POINTERS = {
    **{name: "*bf16" for name in ("x_ptr", "m_ptr", "scale_ptr", "fresh_ptr", "memory_ptr")},
    **dict.fromkeys(("out_ptr", "peak_ptr", "tiles_ptr"), "*fp32"),
    **dict.fromkeys(("payload_ptr", "turned_ptr"), "*u8"),
    **dict.fromkeys(("finite_ptr", "order_ptr"), "*i32"),
    "row_ptr": "*i64",
    "key": "i64",
}
_CODES = {"BITS": 4, "GROUP": 128, "STOCHASTIC": False, "DELTA": True, "FULL": True}
_STOCHASTIC = {**_CODES, "BITS": 7, "STOCHASTIC": True}
_TILES = {"TILES": 16, "HAS_MEMORY": True, "HAS_FRESH": True, "HAS_OUT": True}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "scale": (uniform.scale_kernel, {**_CODES, "CHUNK": 128}),
    "encode": (uniform._encode_kernel, _CODES),
    "encode, 7 bits, stochastic": (uniform._encode_kernel, _STOCHASTIC),
    "decode": (uniform._decode_kernel, _CODES),
    "survey": (hadamard._survey_kernel, _TILES),
    "gather": (hadamard._gather_kernel, _TILES),
    "scatter": (hadamard._scatter_kernel, _TILES),
}


def compiled(name: str, capability: int) -> Any:
    """A kernel for a GPU that need not be there, pointers and strides 16-aligned."""
    kernel, constants = KERNELS[name]
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    loose = ("first", "key", "step")
    signature = {n: "constexpr" if n in known else POINTERS.get(n, "i32") for n in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if argument not in known and argument not in loose
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False})


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and shared memory of a block in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spilled = found["STACK"] + found["LOCAL"]
    return {"registers": found["REG"], "spilled": spilled, "shared": kernel.metadata.shared}


def table(capability: int) -> dict[str, dict[str, int]]:
    return {name: resources(compiled(name, capability)) for name in KERNELS}


def main() -> None:
    """Write the tables of all GPUs, a line per kernel."""
    parts = [f' "triton": "{triton.__version__}"']
    for capability in CAPABILITIES:
        rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table(capability).items()]
        parts.append(f' "sm_{capability}": {{\n' + ",\n".join(rows) + "\n }")
    sys.stdout.write("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
