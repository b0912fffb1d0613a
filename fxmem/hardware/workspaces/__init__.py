"""Memory that no tensor owns: cuDNN and cuBLAS workspaces, and what kernels allocate beside their results.

What an op allocates unseen is a `HiddenMemory`: the sequence of its allocations and frees, with the places of the op's
own outputs among them, which the op's row says (`fxmem.hardware.operators`). Convolutions leave the size of cuDNN's
workspaces open, because cuDNN is asked for a whole model at once:

    seen = collector.find_hidden("aten.convolution.default", args, result)
    answers = conv_workspaces(seen.memory.signatures, target)
    memory = seen.memory.fill_workspaces({signature: answer.nbytes for signature, answer in answers.items()})

Nothing here imports torch, and cuDNN is loaded in a child process only.
"""

from fxmem.hardware.context import CUBLAS_VARIABLES as CUBLAS_VARIABLES
from fxmem.hardware.hidden_memory import ConvSignature as ConvSignature
from fxmem.hardware.hidden_memory import HeldBuffer as HeldBuffer
from fxmem.hardware.hidden_memory import HiddenMemory as HiddenMemory
from fxmem.hardware.hidden_memory import Signature as Signature
from fxmem.hardware.hidden_memory import expand as expand
from fxmem.hardware.operators import ConvSettings as ConvSettings
from fxmem.hardware.workspaces.collector import Collector as Collector
from fxmem.hardware.workspaces.collector import CpuCollector as CpuCollector
from fxmem.hardware.workspaces.collector import Seen as Seen
from fxmem.hardware.workspaces.collector import SeenOp as SeenOp
from fxmem.hardware.workspaces.cudnn_client import ASKING as ASKING
from fxmem.hardware.workspaces.cudnn_client import CudnnLibrary as CudnnLibrary
from fxmem.hardware.workspaces.cudnn_client import cache_directory as cache_directory
from fxmem.hardware.workspaces.cudnn_client import conv_workspaces as conv_workspaces
from fxmem.hardware.workspaces.cudnn_client import fetch_cudnn as fetch_cudnn
from fxmem.hardware.workspaces.cudnn_client import find_built as find_built
from fxmem.hardware.workspaces.cudnn_client import find_cudnn as find_cudnn
from fxmem.hardware.workspaces.cudnn_client import list_cudnns as list_cudnns
from fxmem.hardware.workspaces.cudnn_client import read_cudnn_folder as read_cudnn_folder
from fxmem.hardware.workspaces.cudnn_client import version_number as version_number
from fxmem.hardware.workspaces.driverless import apply_rule as apply_rule
from fxmem.hardware.workspaces.driverless import find_seen as find_seen
from fxmem.hardware.workspaces.insertion import BareLog as BareLog
from fxmem.hardware.workspaces.insertion import TimedOp as TimedOp
from fxmem.hardware.workspaces.insertion import copy_in_memory as copy_in_memory
from fxmem.hardware.workspaces.insertion import insert_workspaces as insert_workspaces
