"""Other kernels for the same mathematics: settings, attention, those that the compiler writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fxmem.records.names import Sdpa
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Kind, Profile
from fxmem.simulation.kernels.kernel_settings import KernelSettings, apply_settings, convolution_settings
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.model.fake_model import shadow_model
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant

_BACKENDS: tuple[tuple[Sdpa, str, str], ...] = (
    ("flash", "FLASH_ATTENTION", "_scaled_dot_product_flash_attention"),
    ("efficient", "EFFICIENT_ATTENTION", "_scaled_dot_product_efficient_attention"),
    ("cudnn", "CUDNN_ATTENTION", "_scaled_dot_product_cudnn_attention"),
)
"""A name, torch's `SDPBackend`, and the operator that then runs. Math is left out: it keeps the matrix of scores, which
none of these does."""


def kernel_changes(analysis: Analysis) -> Iterator[Change]:
    """TF32 off, other attention kernels, and the compiler's."""
    if analysis.profile.target.device == "cuda":
        code = "torch.backends.cudnn.allow_tf32 = False"
        yield Change(
            "tf32-off",
            "no TF32 in convolutions: another cuDNN plan, another workspace",
            "rounding",
            code,
            _no_tf32,
            note="more exact, and slower",
        )
        yield from _attention(analysis.profile)
    yield Change(
        "sdpa",
        "attention in one kernel instead of a matrix of scores",
        "rounding",
        'model.set_attn_implementation("sdpa")',
        _one_kernel,
        note="attention weights are no longer to be had",
    )
    yield Change(
        "compile",
        "torch.compile",
        "rounding",
        "model = torch.compile(model)",
        _compile,
        note="the first step, which compiles and tunes, takes more and lasts longer",
    )


def _no_tf32(variant: Variant, analysis: Analysis) -> Variant:
    profile = analysis.profile
    if not any(op.name.startswith("aten.convolution") for op in profile.ops):
        raise NotApplicableError("the model has no convolutions; matrix products take the same memory either way")
    with apply_settings(variant.request.settings):
        allowed = convolution_settings().allow_tf32
    if not allowed:
        raise NotApplicableError("TF32 is off already")
    if not any(storage.kind is Kind.WORKSPACE for storage in profile.storages):
        raise NotApplicableError("the convolutions take no workspace")
    return _set(variant, allow_tf32=False)


def _compile(variant: Variant, _: Analysis) -> Variant:
    if variant.request.world is not None:
        raise NotApplicableError("a sharded step is analysed as eager code")
    return variant.replace_step(compile=CompileSettings())


def _set(variant: Variant, **changes: Any) -> Variant:
    settings = (variant.request.settings or KernelSettings()).model_copy(update=changes)
    return variant.replace_step(settings=settings)


def _attention(profile: Profile) -> Iterator[Change]:
    """Yield the attention kernels that do not run now. Those that a card or dtype rules out are refused when
    analysed."""
    ran = {op.name.split(".")[1] for op in profile.ops if op.name.startswith("aten._scaled_dot_product")}
    if not any(node.target.endswith("scaled_dot_product_attention") for node in profile.nodes) and not ran:
        return
    for name, backend, op in _BACKENDS:
        if op not in ran:
            code = (
                f"from torch.nn.attention import SDPBackend, sdpa_kernel\nwith "
                f"sdpa_kernel(SDPBackend.{backend}):\n    loss = loss_fn(model(x))"
            )
            yield Change(
                f"sdpa-{name}",
                f"the {name} attention kernel",
                "rounding",
                code,
                _choose_kernel(name),
                excludes="attention",
            )


def _choose_kernel(name: Sdpa) -> Callable[[Variant, Analysis], Variant]:
    return lambda variant, _: _set(variant, sdpa=name)


def _one_kernel(variant: Variant, _: Analysis) -> Variant:
    if getattr(getattr(variant.model, "config", None), "_attn_implementation", None) != "eager":
        raise NotApplicableError("no transformers model with eager attention")
    model = shadow_model(variant.model)
    choose: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise NotApplicableError("this transformers cannot change the attention of a built model")
    try:
        choose("sdpa")
    except (ValueError, ImportError) as error:
        raise NotApplicableError(f"the model has no such attention: {error}") from error
    return dataclasses.replace(variant, model=model)
