"""Ask the installed torch, on the stand-in, what it allocates; print one JSON object.

Each call is made twice and the second one's log is read. `rule` is what fxmem says of the same call: sizes in the order
they are allocated, results included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from fxmem.hardware.catalogue import target
from fxmem.hardware.workspaces import Collector, ConvSettings
from fxmem.records.profile import Phase
from tests.memory.test_allocator import requests, stream_of

aten: Any = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD")


def empty(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    """A tensor on the card."""
    return torch.empty(shape, device="cuda", dtype=dtype)


def log_of(call: Callable[[], Any]) -> tuple[list[int], Any]:
    """Return what a call allocates (positive) and frees (negative), in order, and what it returned."""
    call()
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python", context=None)
    result = call()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs], result


def calls() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Give names, operators and arguments."""
    x, w, b = empty(128, 256), empty(256, 512), empty(512)
    eight, columns = empty(128, 256, dtype=torch.int8), empty(512, 256, dtype=torch.int8).t()
    one = empty()
    yield "mm", aten.mm.default, (x, w)
    yield "mm, expanded", aten.mm.default, (one.expand(128, 256), w)
    yield "addmm", aten.addmm.default, (b, x, w)
    yield "addmm, matrix", aten.addmm.default, (empty(128, 512), x, w)
    yield "bmm", aten.bmm.default, (x.view(2, 64, 256), w.view(2, 256, 256))
    yield "baddbmm", aten.baddbmm.default, (empty(2, 64, 256), x.view(2, 64, 256), w.view(2, 256, 256))
    yield "mv", aten.mv.default, (x, x[0])
    yield "addmv", aten.addmv.default, (empty(128), x, x[0])
    yield "dot", aten.dot.default, (b, b)
    yield "_int_mm", aten._int_mm.default, (eight, columns)
    for rows, width in ((512, 1024), (100_000, 96), (4096, 4096)):
        for dtype in (FLOAT, HALF):
            name, like = f"{rows}x{width} {dtype}", empty(rows, width, dtype=dtype)
            weight = empty(width, dtype=dtype)
            mean, rstd = empty(rows, 1), empty(rows, 1)
            yield f"softmax {name}", aten._softmax.default, (like, -1, False)
            yield f"softmax backward {name}", aten._softmax_backward_data.default, (like, like, -1, dtype)
            yield f"log_softmax backward {name}", aten._log_softmax_backward_data.default, (like, like, -1, dtype)
            yield f"layer_norm {name}", aten.native_layer_norm.default, (like, [width], weight, weight, 1e-5)
            masks = [True, True, True]
            norm = (like, like, [width], mean, rstd, weight, weight, masks)
            yield f"layer_norm backward {name}", aten.native_layer_norm_backward.default, norm
            expanded = (one.to(dtype).expand(rows, width), *norm[1:])
            yield f"layer_norm backward, expanded {name}", aten.native_layer_norm_backward.default, expanded
            if hasattr(aten, "_fused_rms_norm_backward"):
                rms = (like, like, [width], rstd, weight, [True, True])
                yield f"rms_norm backward {name}", aten._fused_rms_norm_backward.default, rms
            for dims in ([0], [1], [0, 1]):
                yield f"sum {dims} {name}", aten.sum.dim_IntList, (like, dims)
            yield f"mean {name}", aten.mean.default, (like,)
            yield f"amax {name}", aten.amax.default, (like, [0])
            yield f"topk {name}", aten.topk.default, (like, 8)
            yield f"sort {name}", aten.sort.default, (like,)
            yield f"cumsum {name}", aten.cumsum.default, (like, 1)
            yield f"gelu backward {name}", aten.gelu_backward.default, (like, like)
    long = empty(512, 16384)
    yield "sort, long rows", aten.sort.default, (long,)
    tokens, grads = empty(4, 1000, dtype=torch.int64), empty(4, 1000, 96)
    yield "embedding backward", aten.embedding_dense_backward.default, (grads, tokens, 1000, -1, False)
    table, index = empty(169, 4), empty(2401, dtype=torch.int64)
    yield "index_put", aten.index_put.default, (table, [index], empty(2401, 4), True)
    yield "mse_loss", aten.mse_loss.default, (x, x)
    yield "smooth_l1_loss", aten.smooth_l1_loss.default, (x, x)
    yield "bce with logits", aten.binary_cross_entropy_with_logits.default, (x, x)
    yield "logsumexp", aten.logsumexp.default, (x, [1])
    image, group = empty(8, 64, 16, 16), empty(8, 32)
    sizes, channels = (8, 64, 256, 32), empty(64)
    yield "group_norm", aten.native_group_norm.default, (image, channels, channels, *sizes, 1e-5)
    yield (
        "group_norm backward",
        aten.native_group_norm_backward.default,
        (image, image, group, group, channels, *sizes, [True, True, True]),
    )
    yield from batch_norm_calls()
    for tokens_, heads, head in ((512, 12, 64), (2048, 8, 128), (100, 4, 96)):
        q = empty(2, heads, tokens_, head, dtype=HALF)
        yield f"flash {tokens_}x{head}", aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.0, True)
        yield (
            f"efficient {tokens_}x{head}",
            aten._scaled_dot_product_efficient_attention.default,
            (q, q, q, None, True, 0.0, True),
        )


def batch_norm_calls() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The parts of `SyncBatchNorm`, among 4 ranks."""
    shapes = {
        "images": (8, 64, 56, 56),
        "deep images": (2, 2048, 16, 32),
        "volumes": (2, 8, 64, 4, 4),
        "rows": (512, 300),
    }
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for kind, shape in shapes.items():
        contiguous = empty(*shape)
        forms = [("", contiguous)]
        if len(shape) in last:
            forms.append((", channels last", contiguous.contiguous(memory_format=last[len(shape)])))
        for form, x in ((name, each.to(dtype)) for name, each in forms for dtype in (FLOAT, HALF)):
            name, channel, ranks = f"of {kind}{form} {x.dtype}", empty(shape[1]), empty(4, shape[1])
            statistics, counts = (channel, channel), empty(4)
            yield f"batch_norm_stats {name}", aten.batch_norm_stats.default, (x, 1e-5)
            gathered = (x, ranks, ranks, *statistics, 0.1, 1e-5, counts)
            yield f"gather_stats {name}", aten.batch_norm_gather_stats_with_counts.default, gathered
            yield f"batch_norm_elemt {name}", aten.batch_norm_elemt.default, (x, channel, channel, *statistics, 1e-5)
            for wanted in ((True, True, True), (False, True, True), (True, False, False)):
                reduced = (x, x, *statistics, channel, *wanted)
                yield f"reduce {wanted} {name}", aten.batch_norm_backward_reduce.default, reduced
            ended = (x, x, *statistics, channel, *statistics, counts.int())
            yield f"batch_norm_backward_elemt {name}", aten.batch_norm_backward_elemt.default, ended


def ask_rule(op: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """What fxmem says that a call allocates on an H100, in order."""
    collector = Collector(target("h100"), torch.__version__, os.environ, ConvSettings())
    collector.note(0, str(op), args, result, Phase.FORWARD)
    memory = collector.resolve().get(0)
    outputs = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
    on_card = iter([t.untyped_storage().nbytes() for t in outputs if t.is_cuda])
    rule = [next(on_card, 0) for _ in outputs]
    if memory is not None:
        on_card = iter(rule)
        rule = [
            next(on_card, 0) if e.action == "output" else e.nbytes or 0 for e in memory.events if e.action != "free"
        ]
        rule += list(on_card)
    return [nbytes for nbytes in rule if nbytes != 0]


def ask_calls() -> dict[str, Any]:
    """By call: the log, and whether fxmem's rule has the same allocations."""
    answers: dict[str, Any] = {}
    for name, op, args in calls():
        try:
            log, result = log_of(lambda op=op, args=args: op(*args))
        except RuntimeError as error:
            answers[name] = {"error": str(error).splitlines()[0][:100]}
            continue
        rule = ask_rule(op, args, result)
        answers[name] = {"log": log, "rule": rule, "agrees": [n for n in log if n > 0] == rule}
    return answers


def ask_optimizers() -> dict[str, Any]:
    """By optimizer and form: peak of the second step over what is there before it, and a digest of its log."""
    answers = {}
    for name in OPTIMIZERS:
        for form in ("foreach", "fused", "for-loop"):
            weights = [empty(n, 257).requires_grad_() for n in (3, 300, 1024, 4096)]
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            options: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
            try:
                optimizer = getattr(torch.optim, name)(weights, lr=0.1, **options)
                log, _ = log_of(optimizer.step)
            except (TypeError, RuntimeError):
                continue
            live = peak = 0
            for nbytes in log:
                live += nbytes
                peak = max(peak, live)
            answers[f"{name}, {form}"] = {"peak": peak, "log": digest(log)}
    return answers


def ask_allocator() -> dict[str, Any]:
    """A digest of all answers to 3,000 requests on STREAMS streams, addresses included, and the peaks.

    Each line is one of `tests.memory.test_allocator.answers`. Settings are those of `PYTORCH_CUDA_ALLOC_CONF`.
    """
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(int(os.environ["STREAMS"]) - 1))]
    live: dict[int, int] = {}
    text = sha256()
    for verb, name, nbytes in requests(int(os.environ["SEED"]), 3000):
        head = verb
        if verb == "malloc":
            stream = streams[stream_of(name, len(streams))]
            try:
                live[name] = torch.cuda.caching_allocator_alloc(nbytes, stream=stream)
                head = str(live[name])
            except torch.OutOfMemoryError:
                head = "oom"
        elif verb == "empty":
            torch.cuda.empty_cache()
        elif name in live:
            torch.cuda.caching_allocator_delete(live.pop(name))
        stats = torch.cuda.memory_stats()
        current = [stats[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated", "reserved")]
        line = [head, *current, stats["segment.all.current"], stats["num_alloc_retries"], stats["num_ooms"]]
        text.update(" ".join(map(str, line)).encode() + b"\n")
    kinds = [f"{kind}_bytes.all.peak" for kind in ("requested", "allocated", "reserved")]
    return {"log": text.hexdigest()[:16], "peaks": [stats[kind] for kind in (*kinds, "num_alloc_retries", "num_ooms")]}


def digest(value: Any) -> str:
    """A short text that is equal for equal values."""
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


if __name__ == "__main__":
    torch.cuda.init()
    questions = {"calls": ask_calls, "optimizers": ask_optimizers, "allocator": ask_allocator}
    print(json.dumps({"torch": torch.__version__, **questions[os.environ["ASK"]]()}))
