"""Predictions held against measurements of real cards, and what else says that the numbers are right."""
