"""Serving engines: what a release does at its start, and how it keeps keys and values."""
