"""Memory snapshots of cards (`torch.cuda.memory._dump_snapshot`): read in bounded memory, and explained."""

from fxmem.memory.snapshots.reader import ALLOC as ALLOC
from fxmem.memory.snapshots.reader import FREE as FREE
from fxmem.memory.snapshots.reader import GROW as GROW
from fxmem.memory.snapshots.reader import HELD as HELD
from fxmem.memory.snapshots.reader import NO_HISTORY as NO_HISTORY
from fxmem.memory.snapshots.reader import SHRINK as SHRINK
from fxmem.memory.snapshots.reader import Dump as Dump
from fxmem.memory.snapshots.reader import StackFrame as StackFrame
from fxmem.memory.snapshots.reader import describe_frames as describe_frames
from fxmem.memory.snapshots.reader import is_pickle as is_pickle
from fxmem.memory.snapshots.reader import read_dump as read_dump
from fxmem.memory.snapshots.report import report_dump as report_dump
