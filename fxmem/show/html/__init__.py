"""HTML pages, each one file that loads nothing from elsewhere."""

from __future__ import annotations

from fxmem.show.html.by_line import html as lines_html
from fxmem.show.html.report import html

__all__ = ["html", "lines_html"]
