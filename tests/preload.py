"""Libraries for LD_PRELOAD, which stand between a program and the system."""

import shutil
import subprocess
from pathlib import Path

import pytest


def build(source: str, folder: Path) -> Path:
    """Compile; skips without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    file = folder / "preload.c"
    file.write_text(f"#define _GNU_SOURCE\n#include <dlfcn.h>\n{source}", encoding="utf-8")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", "preload.so", file, "-ldl"], cwd=folder, check=True
    )
    return folder / "preload.so"
