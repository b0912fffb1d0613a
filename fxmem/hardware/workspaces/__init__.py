"""Memory that no tensor owns: cuDNN and cuBLAS workspaces, and what kernels allocate beside their results.

What an op allocates unseen is a `HiddenMemory`: the sequence of its allocations and frees, with the places of the op's
own outputs among them, which the op's row says (`fxmem.hardware.operators`). Convolutions leave the size of cuDNN's
workspaces open, because cuDNN is asked for a whole model at once:

    seen = collector.look("aten.convolution.default", args, result)
    answers = conv_workspaces(seen.memory.signatures, target)
    memory = seen.memory.fill_workspaces({signature: answer.nbytes for signature, answer in answers.items()})

Nothing here imports torch, and cuDNN is loaded in a child process only.
"""

from fxmem.hardware.cublas import CUBLAS_VARIABLES
from fxmem.hardware.hidden_memory import ConvSignature, HeldBuffer, HiddenEvent, HiddenMemory, Signature
from fxmem.hardware.operators import ConvSettings
from fxmem.hardware.workspaces.collector import Collector, CpuCollector, Seen
from fxmem.hardware.workspaces.copy_in import copy_in_memory
from fxmem.hardware.workspaces.cudnn_cache import cache_directory
from fxmem.hardware.workspaces.cudnn_client import (
    CudnnLibrary,
    Workspace,
    conv_workspaces,
    find_cudnn,
    read_cudnn_folder,
)
from fxmem.hardware.workspaces.insertion import TimedOp, insert_workspaces

__all__ = [
    "CUBLAS_VARIABLES",
    "Collector",
    "ConvSettings",
    "ConvSignature",
    "CpuCollector",
    "CudnnLibrary",
    "HeldBuffer",
    "HiddenEvent",
    "HiddenMemory",
    "Seen",
    "Signature",
    "TimedOp",
    "Workspace",
    "cache_directory",
    "conv_workspaces",
    "copy_in_memory",
    "find_cudnn",
    "insert_workspaces",
    "read_cudnn_folder",
]
