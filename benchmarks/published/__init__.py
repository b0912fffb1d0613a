"""Published GPU memory figures held against predictions: `python -m benchmarks.published` (`make published`).

A table of `tables/` holds the figures of one published experiment with their source; `steps/` has the functions that
build the steps, written anew from what the published programs do. The settings of a step are read from its source
and are never fitted to the figure.
"""
