"""HTML pages, each one file that loads nothing from elsewhere, and the view for notebooks."""

from __future__ import annotations

from fxmem.show.html.by_line import lines_html
from fxmem.show.html.explanation import snapshot_html
from fxmem.show.html.live import live_html
from fxmem.show.html.notebook import notebook_html
from fxmem.show.html.report import PageOptions, report_html

__all__ = ["PageOptions", "lines_html", "live_html", "notebook_html", "report_html", "snapshot_html"]
