"""Compiled steps."""
