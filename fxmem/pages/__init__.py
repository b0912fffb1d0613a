"""HTML pages, each one file that loads nothing from elsewhere."""

from __future__ import annotations

from fxmem.pages.lines import html as lines_html
from fxmem.pages.step import html

__all__ = ["html", "lines_html"]
