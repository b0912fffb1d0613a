"""Losses for alignment and distillation, and a mixture of experts, of Liger-Kernel's benchmarks in torch's operators.

Source: linkedin/Liger-Kernel, benchmark/scripts and the reference losses of test/. The modules that are compared are on
the card too (`others`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Program, Step
from .loops import forward_after_backward, leaf, linear, meta, train_function

BF16 = torch.bfloat16
HIDDEN, VOCABULARY = 4096, 128256

# --- alignment --------------------------------------------------------------------------------------------------------


def grpo(B: int, *, level: str) -> Step:
    """The GRPO loss over 1024 tokens a row with a reference model; importance sampling by token or by sequence."""
    tokens = 1024

    def function(m: Any) -> Tensor:
        logits = m.x @ m.layer.weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        chosen = log_probs.gather(dim=-1, index=m.ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = m.reference_x @ m.reference.weight.t()
            reference_log_probs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_log_probs.gather(dim=-1, index=m.ids.unsqueeze(-1)).squeeze(-1)
        log_ratio = chosen - chosen.detach()
        if level == "sequence":
            log_ratio = (log_ratio * m.mask).sum(-1) / m.mask.sum(-1).clamp(min=1.0)
            log_ratio = log_ratio.unsqueeze(-1)
        ratio = torch.exp(log_ratio)
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        per_token = -torch.min(ratio * m.advantages.unsqueeze(1), clipped * m.advantages.unsqueeze(1))
        divergence = torch.exp(reference - chosen) - (reference - chosen) - 1.0
        per_token = per_token + 0.1 * divergence
        return (per_token * m.mask).sum() / torch.clamp(m.mask.sum(), min=1.0)

    return train_function(
        function,
        x=leaf(B, tokens, HIDDEN, dtype=BF16),
        reference_x=meta(B, tokens, HIDDEN, dtype=BF16),
        ids=meta(B, tokens, dtype=torch.int64),
        mask=meta(B, tokens),
        advantages=meta(B, dtype=BF16),
        layer=linear(HIDDEN, VOCABULARY),
        reference=linear(HIDDEN, VOCABULARY),
        others=nn.ModuleList([linear(HIDDEN, VOCABULARY) for _ in range(2)]),
    )


def kto(B: int) -> Step:
    """The KTO loss over 512 tokens a row with a reference model; half of the rows are preferred.

    How many rows are preferred is random in the script; only the sum of both parts decides the memory.
    """
    tokens, width = 512, 1024

    def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
        mask = labels != 42
        labels = torch.where(labels == 42, 0, labels)
        per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (per_token * mask).sum(-1) / mask.sum(-1)

    def policy(m: Any) -> tuple[Tensor, ...]:
        outputs = m.x @ m.layer.weight.t()
        outputs = outputs + m.layer.bias
        logits = outputs.float()
        means = log_probabilities(logits, m.target)
        return means[m.chosen], means[m.rejected], logits[m.chosen], logits[m.rejected]

    def reference(m: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = m.reference_x @ m.reference.weight.t()
            logits = logits + m.reference.bias
            means = log_probabilities(logits, m.target)
            return means[m.chosen], means[m.rejected]

    def function(m: Any) -> Tensor:
        kept = policy(m)  # the published function keeps the logits in a tuple until it returns
        chosen, rejected = reference(m)
        gains = 1 - F.sigmoid(0.1 * ((kept[0] - chosen) - m.kl))
        losses = 1 - F.sigmoid(0.1 * (m.kl - (kept[1] - rejected)))
        return torch.cat((gains, losses), 0).mean()

    layers = [nn.Linear(width, VOCABULARY, dtype=BF16, device="meta") for _ in range(4)]
    return train_function(
        function,
        x=meta(B, tokens, width, dtype=BF16),
        reference_x=meta(B, tokens, width, dtype=BF16),
        target=meta(B, tokens, dtype=torch.int64),
        chosen=meta(B // 2, dtype=torch.int64),
        rejected=meta(B // 2, dtype=torch.int64),
        kl=meta(1, dtype=BF16),
        layer=layers[0],
        reference=layers[1],
        others=nn.ModuleList(layers[2:]),
    )


# --- distillation -----------------------------------------------------------------------------------------------------


def soft_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """The Jensen-Shannon divergence between the words of student and teacher, as in the reference of December 2024."""
    student = student / 1.0
    teacher = teacher / 1.0
    student_probs = F.softmax(student, dim=-1)
    teacher_probs = F.softmax(teacher, dim=-1)
    log_mean_probs = torch.log((student_probs + teacher_probs) / 2)
    student_kl = F.kl_div(log_mean_probs, torch.log(student_probs), reduction="batchmean", log_target=True)
    teacher_kl = F.kl_div(log_mean_probs, torch.log(teacher_probs), reduction="batchmean", log_target=True)
    return (student_kl + teacher_kl) / 2


def soft_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """One less the cosine similarity of student and teacher, as in the reference of June 2025."""
    student /= 1.0
    teacher /= 1.0
    student_norm = F.normalize(student, p=2, dim=-1)
    teacher_norm = F.normalize(teacher, p=2, dim=-1)
    similarity = F.cosine_similarity(student_norm, teacher_norm, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


SOFT_LOSSES = {"jsd": soft_jsd, "cosine": soft_cosine}


def distillation(BT: int, *, soft: str) -> Step:
    """The output layers of a student of half the width and of a teacher, a hard loss and a soft one."""

    def forward(m: Any) -> tuple[Tensor, Tensor, Tensor]:
        student_outputs = m.x.view(-1, HIDDEN // 2) @ m.student.weight.t()
        with torch.no_grad():
            teacher_outputs = m.teacher_x.view(-1, HIDDEN) @ m.teacher.weight.t()
        student = student_outputs.view(BT, -1).float()
        teacher = teacher_outputs.view(BT, -1).float()
        return student, teacher, F.cross_entropy(student, m.target)

    def function(m: Any) -> Tensor:
        kept = forward(m)
        student, teacher, hard = kept
        return 0.5 * hard + 0.5 * SOFT_LOSSES[soft](student, teacher)

    return train_function(
        function,
        x=leaf(BT, HIDDEN // 2, dtype=BF16),
        other_x=meta(BT, HIDDEN // 2, dtype=BF16),
        source_x=meta(BT, HIDDEN // 2, dtype=BF16),
        teacher_x=meta(BT, HIDDEN, dtype=BF16),
        target=meta(BT, dtype=torch.int64),
        student=linear(HIDDEN // 2, VOCABULARY),
        teacher=linear(HIDDEN, VOCABULARY),
        others=nn.ModuleList([linear(HIDDEN // 2, VOCABULARY), linear(HIDDEN, VOCABULARY)]),
    )


# --- mixture of experts -----------------------------------------------------------------------------------------------


def mixture_of_experts(T: int, E: int, *, direction: str) -> Step | Program:
    """Qwen3-30B-A3B's experts in a loop, as transformers wrote them: each of `T` tokens is sent to 8 of `E` experts.

    The tokens are sent by random logits, which are other ones on a card.
    """
    width, inner, chosen = 2048, 768, 8
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(42))
    shares = logits.topk(chosen).indices.flatten().bincount(minlength=E).tolist()

    def function(m: Any) -> Tensor:
        gate_up, down = m.gate_up * 0.02, m.down * 0.02  # not leaves, and neither are the script's
        final = torch.zeros_like(m.x)
        with torch.no_grad():
            mask = F.one_hot(m.experts.long(), num_classes=E)
            mask = mask.permute(2, 1, 0)
        for expert in range(E):
            places = m.places[: shares[expert]].clone()  # of `torch.where`: one storage for both
            position, token = places.unbind(1)
            current = m.x[token]
            gate, up = F.linear(current, gate_up[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * up
            current = F.linear(current, down[expert])
            current = current * m.weights[token, position, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final

    residents = {
        "x": leaf(T, width, dtype=BF16),
        "gate_up": leaf(E, 2 * inner, width, dtype=BF16),
        "down": leaf(E, width, inner, dtype=BF16),
        "weights": leaf(T, chosen, dtype=BF16),
        "experts": meta(T, chosen, dtype=torch.int32),
        "places": meta(max(shares), 2, dtype=torch.int64),
    }
    if direction == "forward":
        return forward_after_backward(function, **residents)
    return train_function(function, retain=True, random_gradient=True, **residents)
