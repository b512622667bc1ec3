"""What pyproject.toml cannot say: the package page, for the repository that it is published from.

THINPIPE_REPOSITORY=https://host/owner/thinpipe python -m build

With it, the page's links and images lead to that repository, at the tag of this version, and the
package names it. Without it, links stay relative, which a package page does not show.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = "THINPIPE_REPOSITORY"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")


def package_page(text: str, repository: str, version: str) -> str:
    """Markdown with relative links and images made absolute."""

    def absolute(found: re.Match[str]) -> str:
        image, label, path = found.groups()
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({repository}/{kind}/v{version}/{path})"

    return _LINK.sub(absolute, text)


def urls(repository: str, version: str) -> dict[str, str]:
    """Links beside the package page."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def main() -> None:
    """Build with what pyproject.toml leaves to this file."""
    version = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    repository = os.environ.get(REPOSITORY, "").rstrip("/")
    text = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=package_page(text, repository, version) if repository else text,
        long_description_content_type="text/markdown",
        project_urls=urls(repository, version) if repository else {},
    )


if __name__ == "__main__":
    main()
