"""Public training scripts, run untouched on a pretended card."""
