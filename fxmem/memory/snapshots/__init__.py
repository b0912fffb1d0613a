"""Memory snapshots of cards (`torch.cuda.memory._dump_snapshot`): read in bounded memory, and explained."""

from __future__ import annotations

from fxmem.memory.snapshots.reader import Dump as Dump
from fxmem.memory.snapshots.reader import is_pickle as is_pickle
from fxmem.memory.snapshots.reader import read_dump as read_dump
from fxmem.memory.snapshots.report import report_dump as report_dump
