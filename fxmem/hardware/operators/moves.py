"""Views, copies, conversions and rearrangements, creation and random numbers: no arithmetic is counted."""

from __future__ import annotations

from itertools import chain

from fxmem.hardware.hidden_memory import Events, alloc, free, output
from fxmem.hardware.operators.registry import Call, Operator, undetermined
from fxmem.hardware.tensor_layouts import read_layout


def _cat_on_cpu(call: Call) -> Events | None:
    """`cat_out_cpu` (TensorShape.cpp): slices in another dtype than the result's are cast."""
    made, given = call.made, [read_layout(each) for each in call.args[0]]
    slices = (
        cast_slice(number, each.nbytes)
        for number, each in enumerate(given, 1)
        if each.numel and each.dtype != made.dtype
    )
    events = tuple(chain.from_iterable(slices))
    return (output("result"), *events) if events else None


def cast_slice(number: int, nbytes: int) -> Events:
    """`cat` on the CPU of several dtypes: a slice, written in its own first."""
    name = f"slice {number} before it is cast"
    return alloc(name, nbytes), *free(name)


def _roll(call: Call) -> Events | None:
    """`roll_common` (TensorTransformations.h): the tensor is rolled along one dimension after the other."""
    dims = call.argument(2, ())
    events = (alloc(f"rolled along {dim}", call.layout().nbytes) for dim in dims[:-1])
    return (*events, output("result")) if dims[1:] else None


_MOVES, _MAKES = Operator(0), Operator(0, is_opaque=True)

ROWS = {
    "TensorShape.cpp, TensorConversions.cpp": {
        """alias as_strided detach diagonal expand permute reshape select slice split split_with_sizes squeeze t
        transpose unbind unfold unsafe_split unsafe_split_with_sizes unsqueeze view _unsafe_view _reshape_alias _conj
        _neg_view view_as_complex view_as_real resize set lift""": _MOVES,
        "lift_fresh": _MAKES,
        "stack repeat complex diag_embed _local_scalar_dense": _MOVES,
        "repeat_interleave": Operator(0, index_at=0),
        "_to_copy clone": _MAKES,
        "copy": Operator(0, is_opaque=True, traffic="overwrites"),
        "cat": Operator(0, cpu=_cat_on_cpu),
        """as_strided_scatter diagonal_scatter select_scatter slice_scatter diagonal_backward select_backward
        slice_backward""": _MOVES,
    },
    "TensorTransformations.cpp, TriangularOps.cpp": {
        "flip rot90 tril triu": _MOVES,
        "roll": Operator(0, scratch=_roll),
    },
    "TensorFactories.cpp, RangeFactories.cpp, Fill.cpp": {
        """empty empty_like empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like
        new_ones full full_like new_full scalar_tensor arange linspace eye""": _MAKES,
        "logspace": Operator(is_opaque=True),
        "empty_strided tril_indices triu_indices _efficientzerotensor": _MOVES,
        "zero fill": Operator(0, traffic="overwrites"),
    },
    "Distributions.cpp, TensorFactories.cpp": {
        "rand rand_like randn randn_like": _MAKES,
        """randint randint_like bernoulli cauchy exponential geometric log_normal normal random
        uniform""": _MOVES,
        "multinomial": Operator(0, scratch=undetermined),
    },
    "torch/csrc/jit/runtime/register_prim_ops.cpp, torch/csrc/autograd/record_function_ops.cpp": {
        "prim::device profiler::_record_function_enter_new profiler::_record_function_exit": _MOVES
    },
}
