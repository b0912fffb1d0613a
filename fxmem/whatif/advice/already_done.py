"""Advice that the step already follows, with the bytes it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxmem.errors import FxmemError
from fxmem.memory import liveness
from fxmem.records.profile import Phase
from fxmem.records.units import exact_bytes
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant


def made_changes(analysis: Analysis) -> Iterator[Change]:
    """Gradients freed by `zero_grad`, and forward without gradients."""
    if analysis.profile.step.mode == "infer":
        code = "model.eval()\nwith torch.inference_mode():\n    out = model(x)"
        yield Change("no-grad", "forward without gradients, in eval mode", "none", code, _report_only(_no_grad_worth))
    elif analysis.request.optimizer is not None and _frees_gradients(analysis.request):
        code = "optimizer.zero_grad(set_to_none=True)"
        yield Change(
            "set-to-none", "gradients freed, not filled with zeros", "none", code, _report_only(_zero_grad_worth)
        )


def _frees_gradients(request: StepRequest) -> bool:
    return request.accumulate == 1 and not request.keeps_gradients


def _report_only(worth: Callable[[Analysis], str]) -> Callable[[Variant, Analysis], Variant]:
    def make(variant: Variant, analysis: Analysis) -> Variant:
        raise NotApplicableError(worth(analysis))

    return make


def _zero_grad_worth(analysis: Analysis) -> str:
    """The peak of the same step with `set_to_none=False`, beside its own."""
    done = "the step does so already, as PyTorch by default"
    try:
        more = analysis.vary(set_to_none=False).peak.counted_bytes - analysis.peak.counted_bytes
    except FxmemError:
        return done
    return (
        f"{done}; with set_to_none=False its peak is {exact_bytes(more)} higher"
        if more
        else f"{done}; its peak is the same without"
    )


def _no_grad_worth(analysis: Analysis) -> str:
    """A forward that keeps what backward needs is that of a training step."""
    done = "the step runs under no_grad and in eval mode already; inference_mode takes the same memory"
    if analysis.profile.step.precision:
        done += ", without the copies of weights that autocast keeps under no_grad"
    try:
        profile = analysis.vary(mode="train", optimizer=None).profile
    except FxmemError:
        return done
    span = next(span for span in profile.phases if span.phase is Phase.FORWARD)
    more = max(liveness.live_bytes(profile)[span.begin : span.end], default=0) - analysis.peak.requested_bytes
    return f"{done}; without them forward takes {exact_bytes(more)} more" if more > 0 else done
