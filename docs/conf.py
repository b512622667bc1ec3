"""Sphinx: `make docs` builds these pages into build/docs; some are generated from the code."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import reference  # noqa: E402  # needs the path

project = "ThinPipe"
author = "The ThinPipe authors"
copyright = author
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "ThinPipe"
exclude_patterns: list[str] = []
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

reference.write(HERE / "generated")
