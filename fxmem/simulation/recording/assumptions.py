"""What a profile takes for granted, and what it does not know: in sentences for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from fxmem.hardware.catalogue import part_assumption
from fxmem.hardware.context import HOST_BYTES, context_range, format_range, nccl_range
from fxmem.hardware.releases import release_assumption
from fxmem.hardware.step_time import time_assumption
from fxmem.records.parts import CompileRecord
from fxmem.records.profile import Assumption, Kind, Step, Target, Unknown
from fxmem.records.units import COMPILED_AS_EAGER, REAL_VALUES
from fxmem.simulation.asked import checks
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.recording import FinishedRun, Recording

COMPILED = (
    f"{COMPILED_AS_EAGER}: fused kernels keep and make fewer tensors, CUDA graphs hold a pool of their own; "
    "flex_attention is counted as the kernels that are made of it"
)
"""What an analysis says of compiled code."""
_Said = tuple[str, str]
"""A topic and a sentence."""
_WORTH_SAYING = 100
"""A missing loss is named where it would add this share of what else the step keeps, one in so many."""


def assumptions(run: FinishedRun, readers: dict[int, int]) -> Iterator[Assumption]:
    """What was taken for granted of the step; `readers` are the first readers of parameters, by storage."""
    for topic, text in _say(run, readers):
        yield Assumption(topic=topic, text=text)


def _say(run: FinishedRun, readers: dict[int, int]) -> Iterator[_Said]:
    values, log = run.recording.subject.values, run.log
    yield from _program_step(run) if run.is_program else _template_step(run)
    yield from _loss(run)
    yield from _compiled_functions(run.recording)
    yield from (("kernels", text) for text in run.recording.packages.assumptions())
    yield from (("values", text) for text in values.routing.assumptions())
    yield from _compiled_step(run.step.compiled)
    yield from _optimizer(run)
    if {str(getattr(node.target, "__name__", node.target)) for node in run.nodes} & {"isfinite", "isnan", "isinf"}:
        yield "values", "all numbers are finite, where the program asks (isfinite, isnan, isinf)"
    if values.passed_checks or any(op.name == "aten._is_all_true.default" for op in log.ops):
        means = "assert, if …: raise, torch._check_tensor_all, arguments of distributions"
        yield "values", f"what the program checks of its tensors holds ({means})"
    if any(op.name in ("aten.rand.default", "aten.uniform_.default") for op in log.ops):
        middle = "the middle of its range, where the program looks at it (layer drop: the layer is kept)"
        yield "values", f"a single random number drawn on the CPU is {middle}"
    if run.recording.stop_rule.was_asked:
        yield "generation", checks.ASSUMED
    yield from (("generation", text) for text in run.rollouts)
    yield from _engines(run)
    if run.recording.stop_rule.was_drafted:
        yield "generation", checks.DRAFTS_ASSUMED
    if values.reads is not None:
        inputs = ", ".join(f"{label} {'x'.join(map(str, tensor.shape))}" for label, tensor in run.inputs)
        made_up = "weights and inputs without data are made up (ids are all 0), and others may decide otherwise"
        yield "values", f"{REAL_VALUES}, for this batch alone ({inputs}); {made_up}"
    yield from _bounds(run)
    if values.made_up_scalars:
        text = "the optimizer reads numbers from tensors; each was taken to be 1, on which no allocation depends"
        yield "optimizer", text
    if run.cycles > 0:
        text = (
            f"{run.cycles} storages were held by reference cycles until the step's end; a real run frees them "
            f"when Python's garbage collector happens to run"
        )
        yield "cycles", text
    if run.recording.target.device == "cpu":
        yield "workspace", "scratch memory inside CPU kernels (oneDNN convolutions above all) is not included"
    yield from _streams(log)
    yield from _ranks(run)
    unread = sum(
        each.nbytes
        for index, each in enumerate(log.storages)
        if each.kind is Kind.PARAMETER and each.birth == 0 and index not in readers
    )
    if unread:
        yield "unread", f"{unread} bytes of parameters are read by no node; they are resident all the same"
    # torch's math attention is the only caller of `_safe_softmax`.
    if any("scaled_dot_product" in op.name or op.name.startswith("aten._safe_softmax") for op in log.ops):
        yield from ((each.topic, each.text) for each in card_emulation.assumptions(run.recording.target))
    if (of_release := release_assumption(run.recording.target.release(torch.__version__))) is not None:
        yield "torch", of_release
    yield from _card(run.recording.target, run.step)


def _bounds(run: FinishedRun) -> Iterator[_Said]:
    """Shapes that depend on data, and what else depends on it."""
    for what, place in run.recording.subject.values.bounded:
        at = f" at {place}" if place else ""
        yield "values", f"a shape that depends on data is counted at the largest it can be{at}: {what}"
    if run.log.bounds.sizes:
        yield "values", "a size that the program computes depends on data where it equals a shape that does"


def _compiled_functions(recording: Recording) -> Iterator[_Said]:
    """What is taken for granted of what runs without a compiler's kernels."""
    if recording.recorder.runs_compiled_as_eager:
        yield "model", COMPILED
    if recording.ran_scripted and recording.target.device == "cuda":
        yield (
            "model",
            "TorchScript fuses no kernels; where it does on a card, temporaries within them are not allocated",
        )


def _ranks(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of the other ranks."""
    world = run.recording.collectives.world
    if world is not None:
        text = (
            f"rank {world.rank} of {world.size}, {min(world.per_machine, world.size)} to a machine; collectives take "
            f"no memory of their own, and no time in the step's estimate"
        )
        yield "ranks", text


def _streams(log: StepLog) -> Iterator[_Said]:
    """What is taken for granted of allocations on several streams."""
    streams = len({each.stream for each in log.storages})
    if streams > 1:
        text = (
            f"the step allocates on {streams} streams, each with free blocks of its own, as the caching allocator "
            f"has them; backward runs on forward's streams"
        )
        yield "streams", text
    if log.waits.used_on:
        count = len(log.waits.used_on)
        text = (
            f"{count} tensors were given to another stream (record_stream): reserved bytes are a range, from no "
            f"block that waits for that stream to all that wait until the host has waited for it or the step ends"
        )
        yield "streams", text


def _optimizer(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of the optimizer."""
    if run.optimizer is None:
        return
    there = "" if run.is_program else ", its state already there"
    yield "optimizer", _describe_optimizer(run.optimizer, run.recording.target) + there
    if run.step.compiled is None and type(run.optimizer).__module__.startswith("torchao."):
        text = "torchao compiles the optimizer's step, and Inductor may keep fewer temporaries than are counted"
        yield "optimizer", text


def _loss(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of the loss, or what one would add."""
    if run.labels is not None:
        yield "loss", run.labels
    text, nbytes = run.missing_loss
    if text and (not nbytes or nbytes * _WORTH_SAYING >= _known_bytes(run)):
        yield "loss", text


def _known_bytes(run: FinishedRun) -> int:
    """Bytes of the parameters, and of what is saved for backward."""
    return sum(
        each.nbytes
        for index, each in enumerate(run.log.storages)
        if each.kind is Kind.PARAMETER or index in run.recording.nodes.saved_at_end
    )


def _card(target: Target, step: Step) -> Iterator[_Said]:
    """What is taken for granted of the card."""
    if (of_size := part_assumption(target)) is not None:
        yield "target", of_size
    if (how := time_assumption(target, step)) is not None:
        yield "time", how
    context = context_range(target)
    if context is not None:
        size = format_range(context.low, context.high)
        by = "Windows, the CUDA context" if target.system else "the CUDA context"
        text = f"{by} and loaded kernels take {size} beside what the allocator reserves, the range of {context.grounds}"
        nccl = nccl_range(target)
        if nccl is not None:
            text += f"; NCCL's first communicator {format_range(nccl.low, nccl.high)}, that of {nccl.grounds}"
        yield "process", text


def _template_step(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of a step of a model and its inputs."""
    if run.step.mode == "train":
        text = f"one step in its steady state: {_order(run)}; {_held(run, 'output and loss')}"
        yield "step", text
    else:
        under = "inference_mode" if run.step.inference_mode else "no_grad"
        yield "step", f"one forward under {under}; {_held(run, 'the output')}"
    if run.step.accumulate > 1:
        text = (
            f"the last of {run.step.accumulate} micro-batches to one optimizer step: the gradients of those "
            f"before are there when it begins"
        )
        yield "step", text
    ahead = (
        f"so are {run.step.prefetch} further batches like it"
        if run.step.prefetch
        else "a prefetched next batch is not counted"
    )
    yield "residents", f"parameters, buffers and inputs are on the target's device throughout; {ahead}"


def _held(run: FinishedRun, what: str) -> str:
    """How long what a step makes lives, in words."""
    if run.step.keep_outputs:
        return f"the loop's variables hold {what} until those of the next step replace them"
    return f"{what} live until the step's function returns"


def _compiled_step(made: CompileRecord | None) -> Iterator[_Said]:
    """What is taken for granted of a compiled step."""
    if made is None:
        return
    what = f"{made.graphs} graphs, {made.kernels} launches"
    text = (
        f"torch.compile in mode {made.mode}, as inductor of torch {torch.__version__} writes it: {what}; a later "
        "step, whose kernels are built and tuned"
    )
    yield "compile", text
    if not made.graphs:
        yield "compile", "nothing was compiled: the step is analysed as eager code"
    if made.breaks:
        reasons = "; ".join(dict.fromkeys(made.breaks))
        yield "compile", f"{len(made.breaks)} graph breaks: {reasons}"
    if made.cuda_graphs:
        text = (
            f"{made.cuda_graphs} graphs are CUDA graphs: what they allocate, with a copy of each input that may "
            "move, is in a pool of its own and counted as in the step that records them; later steps allocate nothing "
            "there, and the pool stays reserved. Not confirmed by a card"
        )
        yield "compile", text
    if "triton.cudagraph_trees" in made.options:
        yield "compile", "all CUDA graphs share one pool, as with triton.cudagraph_trees"
    if made.cuda_graph_skips:
        yield "compile", f"graphs without a CUDA graph: {'; '.join(made.cuda_graph_skips)}"
    for each in made.timed:
        yield "compile", f"{each.what}: decided on the card by timing; taken as {each.taken}, {each.count} times"


def _program_step(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of a round of a recorded program."""
    text = "a round of the program as it ran, from one optimizer step to the next, with all that its variables keep"
    yield "step", text
    text = (
        "numbers that come off the card are made up (1, 0, False), but for those that follow from known ones; all "
        "are finite"
    )
    yield "values", text
    text = (
        "the host's memory is measured on this machine, without pages of files, and less what fxmem has there: 18 MiB, "
        "24 KiB a node of the graph, and torch._dynamo until the program has it; not counted is what the card's driver "
        f"and libraries have on the host ({HOST_BYTES >> 20} MiB on an H200 after a first step)"
    )
    yield "host", text


def _engines(run: FinishedRun) -> Iterator[_Said]:
    """What is taken for granted of the serving engines of a program."""
    for name, release in dict.fromkeys((each.name, each.release) for each in run.engines):
        yield (
            "engine",
            f"{name} allocates as {release} does in the program's own process, with the weights of transformers; its "
            "sequences end with the last token that they may have",
        )
    if any(each.sleeps for each in run.engines):
        yield (
            "engine",
            "what sleeps has no memory and is counted nowhere, while torch.cuda's counts of a real run include it "
            "(vLLM issue 33625); weights that sleep at level 1 are pinned one by one, of a real run in segments",
        )


def _order(run: FinishedRun) -> str:
    """The parts of a training step in their order, in words."""
    cleared = "gradients are set to None" if run.step.set_to_none else "gradients are filled with zeros"
    if run.step.zero_grad == "before-backward":
        stepped = "" if run.optimizer is None else ", then the optimizer steps"
        return f"forward, loss, {cleared}, backward{stepped}"
    if run.optimizer is None:
        return "forward, loss, backward, then the step ends there; whoever runs it again clears the gradients"
    return f"forward, loss, backward, then the optimizer steps and {cleared}"


def unknowns(run: FinishedRun) -> Iterator[Unknown]:
    """What of the step has no known size or number of FLOPs."""
    made = run.step.compiled
    if made is not None and made.cuda_graphs:
        yield Unknown(topic="memory", what="the CUDA graphs themselves, which the driver keeps beside the allocator")
    if run.recording.target.device == "cuda" and context_range(run.recording.target) is None:
        yield Unknown(topic="memory", what="the CUDA context, which a process holds beside what the allocator reserves")
    ranks = run.recording.collectives.record()
    further = () if ranks is None or run.recording.target.device != "cuda" else ranks.groups[1:]
    if further:
        groups = ", ".join(f"{group.name} of {group.size}" for group in further)
        yield Unknown(
            topic="memory",
            what=f"NCCL's communicators of further groups ({groups}): the upper end of the process's bytes has "
            "688 MiB for each, as was seen among four A100 (NVIDIA/nccl 964); all-to-all takes more",
            count=len(further),
        )
    if run.engines:
        yield Unknown(
            topic="memory",
            what="what an engine has beside torch's allocator, awake or asleep, CUDA graphs above all: of vLLM alone "
            "on a card 0.93 and 1.19 GiB were in use asleep, its CUDA context among it (vLLM 11743, 28714)",
            count=len(run.engines),
        )
    for op, count in sorted(Counter(op.name for op in run.log.ops if op.flops is None).items()):
        yield Unknown(topic="flops", what=op, count=count)
    layers = sum(op.name == "aten.mkldnn_rnn_layer.default" for op in run.log.ops)
    if run.recording.traces_itself:
        yield Unknown(topic="memory", what="what make_fx (torch.func.linearize) keeps, which traces fakes otherwise")
    if layers:
        yield Unknown(
            topic="memory",
            what="oneDNN's workspace tensor of aten.mkldnn_rnn_layer, whose size only oneDNN knows",
            count=layers,
        )


def _describe_optimizer(optimizer: torch.optim.Optimizer, target: Target) -> str:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    if not ({"foreach", "fused"} & group.keys() or type(optimizer).__module__.startswith("torch.")):  # has one form
        return type(optimizer).__name__
    foreach = group.get("foreach", False)
    foreach = card_emulation.default_foreach(target) if foreach is None else foreach
    form = "fused" if group.get("fused") else "foreach" if foreach else "for-loop"
    return f"{type(optimizer).__name__} in its {form} form"
