"""One training step on FakeTensors, written down as a `Profile`."""

from __future__ import annotations

from importlib import import_module

from fxmem.records.pause_gc import pause_gc

with pause_gc(stays=True):  # before any module here imports it
    import_module("torch")
