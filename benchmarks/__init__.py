"""Measurements, comparisons and checks that are no tests; README.md says what lies where."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""Where they leave what came out, with the date in its name."""
