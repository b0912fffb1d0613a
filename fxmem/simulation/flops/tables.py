"""What each operator counts, by its name. In-place and foreach forms share the name."""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.hardware.op_classes import scaled_dot_product_ops
from fxmem.simulation.flops import formulas


def _names(*lines: str) -> list[str]:
    return " ".join(lines).split()


NO_ARITHMETIC = frozenset(
    _names(
        # Views and shapes.
        (
            "alias as_strided detach diagonal expand permute reshape select slice split split_with_sizes squeeze t "
            "transpose unbind unfold unsafe_split"
        ),
        (
            "unsafe_split_with_sizes unsqueeze view _unsafe_view _reshape_alias _conj _neg_view view_as_complex "
            "view_as_real resize set lift lift_fresh"
        ),
        # Copies, conversions and rearrangements, and the gradients of views.
        (
            "_to_copy cat clone copy stack repeat repeat_interleave flip roll rot90 tril triu diag_embed complex "
            "constant_pad_nd im2col pixel_shuffle"
        ),
        (
            "pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
            "replication_pad2d replication_pad3d"
        ),
        (
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d"
        ),
        (
            "as_strided_scatter diagonal_scatter select_scatter slice_scatter diagonal_backward select_backward "
            "slice_backward _local_scalar_dense"
        ),
        # Creation and random numbers.
        (
            "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones "
            "ones_like new_ones full full_like"
        ),
        (
            "new_full zero fill scalar_tensor arange linspace eye tril_indices triu_indices _efficientzerotensor rand "
            "rand_like randn randn_like randint"
        ),
        "randint_like randperm bernoulli cauchy exponential geometric log_normal multinomial normal random uniform",
        # Reading and writing by index or mask.
        (
            "index _unsafe_index index_copy index_fill index_select gather take masked_fill masked_scatter "
            "masked_select "
            "where embedding nan_to_num"
        ),
        # Comparing, ordering, counting and logic: the result is a mask, an index, an integer, or a number that was
        # there before.
        (
            "eq ne lt le gt ge equal isnan isinf signbit all any argmax argmin count_nonzero nonzero sort argsort topk "
            "kthvalue median nanmedian mode"
        ),
        (
            "unique_dim _unique2 bucketize searchsorted logical_and logical_or logical_not logical_xor bitwise_and "
            "bitwise_or bitwise_not bitwise_xor"
        ),
        (
            "bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ _assert_async "
            "_linalg_check_errors _int_mm"
        ),
        # Outside aten.
        "prim::device profiler::_record_function_enter_new profiler::_record_function_exit",
    )
)

EACH = {
    **dict.fromkeys(
        _names(
            "abs neg sign sgn reciprocal mul maximum minimum fmax fmin clamp_min clamp_max floor ceil round trunc",
            (
                "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p pow sin cos tan asin acos atan atan2 sinh cosh tanh "
                "asinh acosh atanh"
            ),
            (
                "erf erfc erfinv lgamma digamma polygamma sinc hypot fmod remainder copysign angle cumsum cumprod "
                "cummax "
                "cummin _amp_update_scale"
            ),
            (
                "relu threshold leaky_relu _prelu_kernel rrelu_with_noise hardshrink softshrink threshold_backward "
                "leaky_relu_backward"
            ),
            "rrelu_with_noise_backward hardshrink_backward softshrink_backward hardtanh_backward hardsigmoid_backward",
        ),
        1,
    ),
    "_log_softmax_backward_data": 4,  # dy - exp(y) sum(dy)
    "_prelu_kernel_backward": 2,  # dy w, dy x
    "_softmax_backward_data": 4,  # (dy - sum(dy y)) y
    "celu": 3,  # a expm1(x b)
    "elu": 3,  # a expm1(x b)
    "floor_divide": 2,  # floor(x / y)
    "frac": 2,  # x - trunc(x)
    "glu": 5,  # a sigmoid(b)
    "hardsigmoid": 4,  # min(max(x + 3, 0), 6) / 6
    "hardswish": 5,  # x min(max(x + 3, 0), 6) / 6
    "hardswish_backward": 3,  # dy (x / 3 + 1 / 2)
    "hardtanh": 2,  # min(max(x, low), high)
    "huber_loss_backward": 3,  # c (x - t) dy
    "lerp": 3,  # x + w (y - x)
    "linalg_cross": 3,  # x1 y2 - x2 y1
    "log_sigmoid_backward": 8,  # dy (d - s z / (1 + z)), z = exp(-|x|)
    "log_sigmoid_forward": 6,  # min(0, x) - log1p(exp(-|x|))
    "logaddexp": 4,  # log(exp(x) + exp(y))
    "logaddexp2": 4,  # log2(exp2(x) + exp2(y))
    "logcumsumexp": 4,  # log(exp(x) + exp(y)), with what came before
    "logit": 3,  # log(x / (1 - x))
    "logit_backward": 3,  # dy / (x (1 - x))
    "mish": 4,  # x tanh(log1p(exp(x)))
    "mish_backward": 13,  # dy (t + x s (1 - t t)), s = sigmoid(x), t = tanh(log1p(exp(x)))
    "mse_loss_backward": 3,  # c (x - t) dy
    "native_dropout_backward": 2,  # dy mask / (1 - p)
    "polar": 4,  # r cos(a), r sin(a)
    "sigmoid": 4,  # 1 / (1 + exp(-x))
    "sigmoid_backward": 3,  # dy (1 - y) y
    "silu": 4,  # x / (1 + exp(-x))
    "silu_backward": 9,  # dy s (1 + x (1 - s)), s = sigmoid(x)
    "smooth_l1_loss_backward": 4,  # c (x - t) dy / beta
    "softplus": 4,  # log1p(exp(x b)) / b
    "softplus_backward": 5,  # dy z / (z + 1), z = exp(x b)
    "tanh_backward": 3,  # dy (1 - y y)
    "upsample_bicubic2d": 35,  # four rows of four points and a column, 7 each (4 products, 3 sums)
    "upsample_bilinear2d": 9,  # two rows of two points and a column, 3 each (2 products, 1 sum)
    "upsample_linear1d": 3,
    "upsample_trilinear3d": 21,  # two planes and a pair
    "xlogy": 2,  # x log(y)
}
"""FLOPs per element of the result."""

EACH_READ = {
    "_safe_softmax": (5, 0),
    "_softmax": (5, 0),  # exp(x - max) / sum(exp(x - max))
    "aminmax": (2, 0),
    "histc": (4, 0),  # bins (x - min) / (max - min), and counting
    "logsumexp": (4, 2),  # max + log(sum(exp(x - max)))
    "mean": (1, 1),
    "std": (4, 3),
    "std_mean": (4, 3),
    "var": (4, 2),  # mean (n + m), sum of (x - mean) (x - mean) over n - 1 (3n + m)
    "var_mean": (4, 2),
    **dict.fromkeys(_names("_amp_foreach_non_finite_check_and_unscale amax amin max min nansum prod sum"), (1, 0)),
    # Gradients that meet in one place are added: each once …
    **dict.fromkeys(
        _names(
            "adaptive_max_pool2d_backward adaptive_max_pool3d_backward col2im embedding_dense_backward unfold_backward"
        ),
        (1, 0),
    ),
    **dict.fromkeys(_names("max_pool2d_with_indices_backward max_pool3d_with_indices_backward"), (1, 0)),
    **{
        f"{name}{d}d_backward": (1, 0)
        for d in (1, 2, 3)
        for name in ("reflection_pad", "replication_pad", "upsample_nearest", "_upsample_nearest_exact")
    },
    # … or to each of the points it was made of, after a product per dimension.
    "upsample_bicubic2d_backward": (48, 0),
    "upsample_bilinear2d_backward": (12, 0),
    "upsample_linear1d_backward": (4, 0),
    "upsample_trilinear3d_backward": (32, 0),
}
"""FLOPs per element of the first argument, and per element of the result."""

_ATTENTION = scaled_dot_product_ops()

FORMULAS: dict[str, formulas.Rule] = {
    **{name: formulas.each(flops) for name, flops in EACH.items()},
    **{name: formulas.read_and_made(*flops) for name, flops in EACH_READ.items()},
    # Products. Those torch counts are for the overloads its formulas refuse.
    **dict.fromkeys(["mm", "bmm"], lambda c: formulas.product(c.self, c.mat2)),
    "addmm": lambda c: formulas.product(c.mat1, c.mat2),
    **dict.fromkeys(["baddbmm", "addbmm"], lambda c: formulas.product(c.batch1, c.batch2)),
    **dict.fromkeys(["mv", "dot", "vdot"], lambda c: 2 * c.read),
    "addmv": lambda c: 2 * c.mat.numel(),
    **dict.fromkeys(["_grouped_mm", "_scaled_grouped_mm"], lambda c: formulas.grouped_mm(c.self, c.mat2)),
    "convolution_backward": formulas.convolution_backward,
    "affine_grid_generator": lambda c: 2 * c.theta.shape[-1] * c.made,  # homogeneous coordinates times theta
    **dict.fromkeys(_ATTENTION, lambda c: formulas.attention(c.query, c.key, c.value)),
    **dict.fromkeys(
        [f"{name}_backward" for name in _ATTENTION],
        lambda c: formulas.attention_backward(c.query, c.key, c.value),
    ),
    # Recurrent layers.
    "_cudnn_rnn": lambda c: formulas.rnn(c, c.weight),
    "_cudnn_rnn_backward": lambda c: formulas.rnn_backward(c, c.weight, c.output_mask[3]),
    "mkldnn_rnn_layer": lambda c: formulas.rnn(c, formulas.mkldnn_weights(c)),
    "mkldnn_rnn_layer_backward": lambda c: formulas.rnn_backward(c, formulas.mkldnn_weights(c)),
    "_thnn_fused_lstm_cell": lambda c: formulas.cell(c, 2),
    "_thnn_fused_gru_cell": lambda c: formulas.cell(c, 3),
    "_thnn_fused_lstm_cell_backward_impl": lambda c: 23 * c.cx.numel() + 4 * c.cx.numel() * c.has_bias,
    "_thnn_fused_gru_cell_backward": lambda c: 16 * c.read + 6 * c.read * c.has_bias,
    # Normalisation.
    **dict.fromkeys(
        ["native_layer_norm", "native_group_norm"],
        lambda c: formulas.normalize(c.made, c.result[1].numel(), c.weight, c.bias),
    ),
    **dict.fromkeys(
        ["native_layer_norm_backward", "native_group_norm_backward"],
        lambda c: formulas.normalize_backward(c.read, c.mean.numel(), c.weight, c.output_mask),
    ),
    "_fused_rms_norm": lambda c: formulas.rms_norm(c.made, c.result[1].numel(), c.weight),
    "_fused_rms_norm_backward": lambda c: formulas.rms_norm_backward(c.read, c.rstd.numel(), c.weight, c.output_mask),
    **dict.fromkeys(
        _names("native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"),
        formulas.batch_norm,
    ),
    "native_batch_norm_backward": formulas.batch_norm_backward,
    "cudnn_batch_norm_backward": lambda c: formulas.normalize_backward(c.read, c.input.shape[1], c.weight),
    "_weight_norm_interface": lambda c: 3 * c.v.numel() + 2 * c.g.numel(),  # v (g / |v|)
    "_weight_norm_interface_backward": lambda c: (
        5 * c.saved_v.numel() + 3 * c.saved_g.numel()
    ),  # dg = sum(dw v) / |v|, (g / |v|) (dw - v (dg / |v|))
    # Pooling: an operation per place of the window, one more for an average.
    "max_pool1d": lambda c: c.made * formulas.window(1, c.kernel_size),
    "max_pool2d_with_indices": lambda c: c.made * formulas.window(2, c.kernel_size),
    "max_pool3d_with_indices": lambda c: c.made * formulas.window(3, c.kernel_size),
    "avg_pool2d": lambda c: c.made * (formulas.window(2, c.kernel_size) + 1),
    "avg_pool3d": lambda c: c.made * (formulas.window(3, c.kernel_size) + 1),
    "avg_pool2d_backward": lambda c: c.read * (formulas.window(2, c.kernel_size) + 1),
    "avg_pool3d_backward": lambda c: c.read * (formulas.window(3, c.kernel_size) + 1),
    **dict.fromkeys(
        ["adaptive_max_pool2d", "adaptive_max_pool3d"],
        lambda c: formulas.window_elements(c.self.shape, c.result[0].shape),
    ),
    **dict.fromkeys(
        ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"],
        lambda c: formulas.window_elements(c.self.shape, c.result.shape) + c.made,
    ),
    **dict.fromkeys(
        ["_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"],
        lambda c: formulas.window_elements(c.self.shape, c.grad_output.shape) + c.read,
    ),
    # Losses.
    "mse_loss": lambda c: formulas.loss(c, 2),  # (x - t)^2
    "huber_loss": lambda c: formulas.loss(c, 4),  # z = |x - t|, then z z / 2 or delta (z - delta / 2)
    "smooth_l1_loss": lambda c: formulas.loss(c, 5),  # z = |x - t|, then z z / 2 / beta or z - beta / 2
    "binary_cross_entropy": lambda c: formulas.loss(c, 8 + (c.weight is not None)),  # -(t log(x) + (1 - t) log(1 - x))
    "binary_cross_entropy_backward": lambda c: (
        c.made * (6 + (c.weight is not None) + (c.reduction == 1))
    ),  # dy (x - t) / max((1 - x) x, eps)
    # (1 - t) x - log_sigmoid(x), the second term times 1 + (pos_weight - 1) t
    "binary_cross_entropy_with_logits": lambda c: formulas.loss(
        c, 9 + 4 * (c.pos_weight is not None) + (c.weight is not None)
    ),
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], formulas.nll),
    # -dy at each target, times weight, over the total weight for a mean; the rest is zeros
    **dict.fromkeys(
        ["nll_loss_backward", "nll_loss2d_backward"],
        lambda c: c.target.numel() * (1 + (c.weight is not None) + (c.reduction == 1)),
    ),
    # Reductions that take an argument.
    "_log_softmax": lambda c: (
        5 * c.read + c.read // max(1, c.self.shape[c.dim] if c.self.dim() else 1)
    ),  # x - max - log(sum(exp(x - max)))
    "linalg_vector_norm": lambda c: formulas.norm(c.read, c.made, c.ord),
    "norm": lambda c: formulas.norm(c.read, c.made, c.p if hasattr(c, "p") else c.ord),
    "dist": formulas.dist,
    "trace": lambda c: min(c.self.shape),
    # Sums by index.
    **dict.fromkeys(
        ["index_put", "_index_put_impl", "_unsafe_index_put"],
        lambda c: formulas.index_put(c.self, c.indices, c.values, c.accumulate),
    ),
    "index_add": lambda c: c.source.numel() * (1 + formulas.factors(c)),
    "scatter": lambda c: c.index.numel() * hasattr(c, "reduce"),
    "scatter_add": lambda c: c.index.numel(),
    "scatter_reduce": lambda c: c.index.numel() + c.made * (c.reduce == "mean"),
    "_embedding_bag": lambda c: formulas.bag(c, c.weight.shape[1]) + c.made * (c.mode == 1),
    **dict.fromkeys(
        ["_embedding_bag_backward", "_embedding_bag_dense_backward"],
        lambda c: (
            c.read if c.mode == 2 else formulas.bag(c, c.grad.shape[1]) + c.read * (c.mode == 1)
        ),  # mode 2: the largest row has all of it
    ),
    # Element by element, depending on an argument.
    **dict.fromkeys(["add", "sub", "rsub"], lambda c: c.made * (1 + formulas.factors(c))),
    **dict.fromkeys(["addcmul", "addcdiv", "addr"], lambda c: c.made * (2 + formulas.factors(c))),
    "clamp": lambda c: c.made * ((c.min is not None) + (c.max is not None)),
    "div": lambda c: c.made * (1 + (getattr(c, "rounding_mode", None) is not None)),
    "native_dropout": lambda c: 0 if c.train is False else 2 * c.made,  # x mask / (1 - p)
    "gelu": lambda c: (
        c.made * (9 if c.approximate == "tanh" else 5)
    ),  # x / 2 (1 + tanh(b (x + k x x x))), x / 2 (1 + erf(x / sqrt(2)))
    "gelu_backward": formulas.gelu_backward,
    "elu_backward": lambda c: c.made * (3 if c.is_result else 4),  # dy b (y + a), dy a exp(b x)
    "glu_backward": lambda c: 9 * c.read,  # s = sigmoid(b), da = dy s, db = (1 - s) s dy a
    # Optimizers' fused steps: the arithmetic of their foreach forms.
    "_fused_adam": lambda c: formulas.fused_adam(c, decay=2),
    "_fused_adamw": lambda c: formulas.fused_adam(c, decay=1),
    "_fused_sgd": formulas.fused_sgd,
    "_fused_adagrad": lambda c: formulas.count_fused(c, 7, decay=2),  # s + g g, p - (lr g) / (sqrt(s) + eps)
}

CORRECTED = frozenset({"convolution_backward"})
"""Ops whose formula here goes before torch's, which is wrong: for a grouped convolution it counts the weight's gradient
as that of a dense one."""

COMPLEX = {"add": 2, "sub": 2, "rsub": 2, "neg": 2, "sum": 2, "mul": 6, "polar": 1, "sgn": 3}
"""Real operations in one complex operation."""

UNCOUNTED: Mapping[str, str] = {
    **dict.fromkeys(_names("_fft_c2c _fft_c2r _fft_r2c"), "depends on how the library factors the length"),
    **dict.fromkeys(
        _names(
            (
                "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig "
                "linalg_inv_ex linalg_lstsq"
            ),
            "linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular",
        ),
        "depends on the solver",
    ),
    **dict.fromkeys(
        _names("grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward"),
        "points outside the input are skipped",
    ),
    **dict.fromkeys(
        _names("_cdist_forward _cdist_backward"), "depends on the norm and on whether a matrix product is used"
    ),
    **dict.fromkeys(_names("_ctc_loss _ctc_loss_backward"), "depends on the lengths of the targets"),
    **dict.fromkeys(_names("_trilinear multi_margin_loss multi_margin_loss_backward"), "rare in models"),
    "embedding_renorm": "depends on how many rows exceed the norm",
}
"""Ops left out on purpose, by name without `aten::` and a trailing underscore, and why."""
