"""Memory that no tensor owns: cuDNN and cuBLAS workspaces, and what kernels allocate beside their results.

What an op allocates unseen is a `HiddenMemory`: the sequence of its allocations and frees, with the places of the op's
own outputs among them. Convolutions leave the size of cuDNN's workspaces open, because cuDNN is asked for a whole model
at once:

    memory = convolution_memory("aten.convolution.default", args, target)
    answers = conv_workspaces(memory.signatures, target)
    memory = memory.fill_workspaces({signature: answer.nbytes for signature, answer in answers.items()})

Nothing here imports torch, and cuDNN is loaded in a child process only.
"""

from fxmem.hardware.cublas import CUBLAS_VARIABLES, CublasWorkspaces, cublas_workspaces
from fxmem.hardware.hidden_memory import (
    ConvSignature,
    HeldBuffer,
    HiddenEvent,
    HiddenMemory,
    Signature,
    alloc,
    free,
    output,
)
from fxmem.hardware.operators import ConvSettings
from fxmem.hardware.operators.attention import (
    cudnn_attention_backward,
    cudnn_attention_forward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
)
from fxmem.hardware.operators.convolution import CONVOLUTIONS, ConvBackend, ConvolutionMemory, convolution_memory
from fxmem.hardware.operators.products import matmul_copies, uses_cublas, uses_cublaslt
from fxmem.hardware.tensor_layouts import MemoryFormat, TensorLayout, read_layout
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
    "CONVOLUTIONS",
    "CUBLAS_VARIABLES",
    "Collector",
    "ConvBackend",
    "ConvSettings",
    "ConvSignature",
    "ConvolutionMemory",
    "CpuCollector",
    "CublasWorkspaces",
    "CudnnLibrary",
    "HeldBuffer",
    "HiddenEvent",
    "HiddenMemory",
    "MemoryFormat",
    "Seen",
    "Signature",
    "TensorLayout",
    "TimedOp",
    "Workspace",
    "alloc",
    "cache_directory",
    "conv_workspaces",
    "convolution_memory",
    "copy_in_memory",
    "cublas_workspaces",
    "cudnn_attention_backward",
    "cudnn_attention_forward",
    "efficient_backward",
    "efficient_forward",
    "find_cudnn",
    "flash_backward",
    "flash_forward",
    "free",
    "insert_workspaces",
    "matmul_copies",
    "output",
    "read_cudnn_folder",
    "read_layout",
    "uses_cublas",
    "uses_cublaslt",
]
