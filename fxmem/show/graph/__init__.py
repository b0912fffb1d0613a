"""The annotated graph of a step as SVG, Graphviz DOT, PNG or PDF. The last two need a converter.

Boxes are calls, or modules whose calls are summed up; frames are the modules around them. Equal siblings are folded
into one, parameters are counted where they are first read, and what is read from far away is named instead of joined by
a line. Names are untrusted text and are escaped. Everything is computed from records, without torch.
"""

from fxmem.records.units import Heat
from fxmem.show.graph.dot import dot_source, render
from fxmem.show.graph.hierarchy_data import hierarchy_data
from fxmem.show.graph.picture import OVERVIEW, DrawingOptions
from fxmem.show.graph.svg_document import Drawing

__all__ = ["OVERVIEW", "Drawing", "DrawingOptions", "Heat", "dot_source", "hierarchy_data", "render"]
