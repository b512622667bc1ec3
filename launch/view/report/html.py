"""The report of a run: `summary.json`, `edges.json` (several machines), `report.html`.

The page is one file: style, scripts and data are inside. `thinpipe watch` serves the same page
without data, which then asks for what changes.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from thinpipe.launch.host import disk
from thinpipe.launch.view.report.content import Json, Story, content, silence
from thinpipe.launch.view.report.edges import write_traces
from thinpipe.launch.view.report.rows import Rows

_FILES = Path(__file__).with_name("page")


def write_report(story: Story) -> Path:
    """Write the files into the run's folder, created if missing; return the page's path."""
    folder = story.info.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(story.summary, indent=2, allow_nan=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if story.traces:
        write_traces(folder, story.traces)
    path = folder / "report.html"
    partial = path.with_name(".report.html.partial")
    partial.write_text(page(f"{story.info.name} - ThinPipe", [whole(story)]), encoding="utf-8")
    disk.replace(partial, path)  # whoever looks at it during the run sees a whole page
    return path


def whole(story: Story, number: int = 0) -> Json:
    """A message of all that a page shows of the run with this number on it, as of now."""
    rows = Rows(story.records)
    parts, told = content(story, rows), silence(story, story.silent_s)
    found = {"run": number, "start": 0, "columns": rows.columns(), "parts": parts}
    return {**found, "silence": told, "told_s": round(time.time())}


def page(title: str, messages: Sequence[Json] | None) -> str:
    """A whole page with its data; without any, it asks the server that it came from.

    All text of the data is in a block that is not executed and cannot be left.
    """
    style, scripts, body = _assets()
    data = json.dumps(messages, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    code = "\n".join(f"<script>{script}</script>" for script in scripts)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy()}">'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
{code}
</body>
</html>
"""


@cache
def content_policy() -> str:
    """What a browser may do with the page: run its own scripts, and ask its own server."""
    style, scripts, _ = _assets()
    hashes = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def _assets() -> tuple[str, tuple[str, ...], str]:
    names = ("page.html", "uPlot.min.css", "page.css", "uPlot.iife.min.js", "chart.js", "page.js")
    texts = ((_FILES / name).read_text(encoding="utf-8").strip() for name in names)
    body, uplot_css, css, *scripts = texts
    return f"{uplot_css}\n{css}", tuple(scripts), body


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
