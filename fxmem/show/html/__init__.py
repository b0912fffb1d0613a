"""HTML pages, each one file that loads nothing from elsewhere, and the view for notebooks."""

from fxmem.show.html.changes import lines_html, snapshot_html
from fxmem.show.html.page import live_html
from fxmem.show.html.report import PageOptions, notebook_html, report_html

__all__ = ["PageOptions", "lines_html", "live_html", "notebook_html", "report_html", "snapshot_html"]
