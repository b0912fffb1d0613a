"""Losses of Liger-Kernel's benchmarks, in torch's own operators (linkedin/Liger-Kernel, benchmark/scripts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import Step
from .loops import leaf, linear, meta, repeat_step, train_function

BF16 = torch.bfloat16
HIDDEN, VOCABULARY = 4096, 128256


def cross_entropy(V: int) -> Step:
    """Cross entropy of 8 x 2048 rows in float32."""

    def step(m: Any) -> None:
        y = F.cross_entropy(m.x, m.target)
        y.backward()

    return repeat_step(step, x=leaf(8 * 2048, V), target=meta(8 * 2048, dtype=torch.int64))


# --- losses whose input is itself the result of a (log-)softmax, whose graph stays ------------------------------------


def jsd_batch_mean(log_q: Tensor, log_p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Jensen-Shannon divergence with torch's reduction over the batch."""
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)

    def divergence(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(a, b, reduction="batchmean", log_target=True)

    loss = 0.5 * divergence(torch.log(m), log_p) + (1 - 0.5) * divergence(torch.log(m), log_q)
    return loss.to(dtype)


def jsd_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Jensen-Shannon divergence by rows, then the mean, as in the script of May 2026."""
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)

    def divergence(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(a, b, reduction="none", log_target=True)

    loss = 0.5 * divergence(torch.log(m), log_p).sum(dim=-1) + (1 - 0.5) * divergence(torch.log(m), log_q).sum(dim=-1)
    return (loss / log_q.shape[0]).sum().to(torch.float)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation distance, the mean over rows."""
    half = torch.abs(p - q) / 2.0
    return torch.sum(half) / p.size(0)


def kl_divergence(log_q: Tensor, p: Tensor) -> Tensor:
    """Kullback-Leibler divergence, the mean over the batch."""
    return F.kl_div(log_q, p, reduction="batchmean")


DIVERGENCES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "kl": (kl_divergence, True),
    "jsd": (jsd_batch_mean, True),
    "jsd_rows": (jsd_rows, True),
    "total_variation": (total_variation, False),
}
"""The function, and whether its input is a log-softmax."""


def divergence(V: int, rows: int, *, name: str) -> Step:
    """A divergence between distributions over a vocabulary, in float32."""
    function, logarithmic = DIVERGENCES[name]

    def before(m: Any) -> Tensor:
        return m.x.log_softmax(-1) if logarithmic else m.x.softmax(-1)  # type: ignore[no-any-return]

    def step(m: Any, x: Tensor) -> None:
        y = function(x, m.target)
        y.backward(retain_graph=True)

    return repeat_step(step, before=before, x=leaf(rows, V), target=meta(rows, V))


# --- an output layer with its loss ------------------------------------------------------------------------------------


def linear_cross_entropy(BT: int) -> Step:
    """An output layer over 128,256 words and its cross entropy, in bfloat16."""

    def function(m: Any) -> Tensor:
        logits = m.layer(m.x)
        return F.cross_entropy(logits, m.target)

    layers = {name: linear(HIDDEN, VOCABULARY) for name in ("layer", "other")}
    return train_function(function, x=leaf(BT, HIDDEN, dtype=BF16), target=meta(BT, dtype=torch.int64), **layers)


def linear_jsd(BT: int) -> Step:
    """The output layers of a student and a teacher and the divergence between them, in bfloat16."""

    def function(m: Any) -> Tensor:
        student = m.student(m.x)
        teacher = m.teacher(m.teacher_x)
        q = torch.log_softmax(student / 1.0, dim=-1)
        p = torch.log_softmax(teacher / 1.0, dim=-1)
        return jsd_batch_mean(q, p, dtype=BF16)

    # The modules that are compared share the weights of both.
    layers = {name: linear(HIDDEN, VOCABULARY) for name in ("student", "teacher")}
    teacher_x = meta(BT, HIDDEN, dtype=BF16)
    return train_function(function, x=leaf(BT, HIDDEN, dtype=BF16), teacher_x=teacher_x, **layers)


def mean_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean log-probability of each row's labels."""
    mask = labels != -100
    labels = torch.where(labels == -100, 0, labels)
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1) / mask.sum(-1)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The loss of ORPO."""
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -(0.1 * F.logsigmoid(odds)).mean()


def contrastive(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The loss of CPO."""
    difference = chosen - rejected
    return -(F.logsigmoid(0.1 * difference) * 1.0 + F.logsigmoid(-0.1 * difference) * 0.0).mean()


def preference(B: int, T: int, *, kind: str) -> Step:
    """An output layer and a preference loss over the two halves of a batch, as in TRL."""
    compare = {"orpo": odds_ratio, "cpo": contrastive}[kind]

    def halves(m: Any) -> tuple[Tensor, ...]:
        n = m.x.shape[0] // 2
        outputs = m.x @ m.layer.weight.t()
        logits = outputs.float()
        nll = F.cross_entropy(logits[:n].view(-1, VOCABULARY), m.target[:n].view(-1))
        means = mean_log_probabilities(logits, m.target)
        return means[:n], means[n:], nll, logits[:n], logits[n:]

    def function(m: Any) -> Tensor:
        kept = halves(m)  # the published function keeps the logits in a tuple until it returns
        return kept[2] + compare(kept[0], kept[1])

    layers = {name: linear(HIDDEN, VOCABULARY) for name in ("layer", "other")}
    return train_function(function, x=leaf(B, T, HIDDEN, dtype=BF16), target=meta(B, T, dtype=torch.int64), **layers)


# --- the loss of Gemma 2 ----------------------------------------------------------------------------------------------

A100_WORKSPACE_BYTES = 8_519_680


def softcapped_loss(direction: str) -> Step:
    """Logits of Gemma 2 (2B) over 8192 tokens, capped, and their cross entropy; inputs are left out of the figure.

    Source: apple/ml-cross-entropy, benchmark/memory.py, which subtracts what is allocated when a warm round ends.
    """
    tokens, width, words = 8192, 2304, 256000

    def function(m: Any) -> Tensor:
        logits = m.e @ m.c.T
        logits = torch.tanh(logits / 30.0) * 30.0
        return F.cross_entropy(logits.float(), m.target)

    def step(m: Any) -> None:
        function(m)

    residents = {
        "e": leaf(tokens, width, dtype=BF16),
        "c": leaf(words, width, dtype=BF16),
        "target": meta(tokens, dtype=torch.int64),
    }
    forward = direction == "forward"
    made = repeat_step(step, times=1, **residents) if forward else train_function(function, accumulate=1, **residents)
    inputs = sum(tensor.nbytes for tensor in residents.values())
    return Step(made.model, made.inputs, made.options, inputs + (1 if forward else 2) * A100_WORKSPACE_BYTES)
