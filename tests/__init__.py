"""The tests mirror the rooms of the package."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
