"""One training step on FakeTensors, written down as a `Profile`."""

from __future__ import annotations

from fxmem.records.pause_gc import pause_gc

with pause_gc(stays=True):
    import torch as torch  # before any module of the room imports it
