"""The manual as HTML: ``make docs``. Strict.

A link, anchor or file that is missing, or a page that no other leads to, fails it.

The pages are plain Markdown that reads as well where it lies; nothing here may need a network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(REPOSITORY))

from lllm3090d.version import VERSION  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "lllm3090d"
author = "the authors of lllm3090d"
version = release = VERSION
language = "en_GB"

extensions = ["myst_parser"]
# As on GitHub.
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
nitpicky = True

html_theme = "furo"
html_title = f"lllm3090d {VERSION}"
html_copy_source = False
html_show_sphinx = False
# Other hosts are asked only by `make docs-links`.
linkcheck_timeout = 30
linkcheck_retries = 2
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]

# Links of the pages to the README, which is beside the manual and a page of it here.
README_LINK = re.compile(r"\]\((?:\.\./)+README\.md(#[^)\s]*)?\)")


def _readme_is_a_page(_app: Sphinx, _docname: str, source: list[str]) -> None:
    source[0] = README_LINK.sub(lambda found: f"](/readme.md{found[1] or ''})", source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _readme_is_a_page)
