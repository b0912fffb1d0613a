"""Plots of a step's memory, each one self-contained SVG document.

Plain SVG, written here: no plotting library has to be installed, text stays text, and a plot is a few tens of
kilobytes. They are light or dark as the reader's screen is and light on paper; colours are told apart by any kind of
colour vision, and beside each stands its name and number. Names are untrusted text and are escaped. Everything is
computed from records, without torch.
"""

from fxmem.show.plots.fits import CurveDot, curve_svg, sizes_svg
from fxmem.show.plots.fits import sweep_svg as sweep_svg
from fxmem.show.plots.history import history_svg, segments_svg
from fxmem.show.plots.icicle import icicle_svg
from fxmem.show.plots.run import run_svg
from fxmem.show.plots.timeline import PlottedStep, StepAfter, step_after, timeline_svg

__all__ = [
    "CurveDot",
    "PlottedStep",
    "StepAfter",
    "curve_svg",
    "history_svg",
    "icicle_svg",
    "run_svg",
    "segments_svg",
    "sizes_svg",
    "step_after",
    "timeline_svg",
]
