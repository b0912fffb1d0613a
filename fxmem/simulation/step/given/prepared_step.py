"""A step as it was given, made one that can be run: the model, and the request that fits it."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem.errors import AnalysisError, UsageError
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.step.given.batches import fit_forward, misnamed_input
from fxmem.simulation.step.given.losses import read_loss
from fxmem.simulation.step.given.optimizers import copy_optimizer
from fxmem.simulation.step.given.training_step import (
    configured_optimizer,
    has_training_step,
    training_step_loss,
    view_training_step,
)
from fxmem.simulation.step.request import StepRequest


def understand(model: nn.Module, request: StepRequest) -> tuple[nn.Module, StepRequest]:
    """The model and the request with what hangs on each other settled. What is settled already stays.

    Raises:
        UsageError: an input that forward does not have, or a loss of an unknown name.
        AnalysisError: there is no forward; what the model says of its training cannot be followed.
    """
    if type(model).forward is nn.Module.forward and "forward" not in vars(model) and not has_training_step(model):
        raise AnalysisError(f"expected a module that can be called; {type(model).__name__} has no forward of its own")
    notes: list[str] = []
    request = dataclasses.replace(request, loss=read_loss(request.loss))
    if request.mode == "train" and request.loss is None and has_training_step(model):
        model = view_training_step(model)
        request = dataclasses.replace(request, loss=training_step_loss)
        notes.append(f"{type(model).__name__}.training_step is run, and what it returns is the loss")
        if request.optimizer == "adamw" and hasattr(model, "configure_optimizers"):
            optimizer = configured_optimizer(model)
            request = dataclasses.replace(request, optimizer=optimizer)
            notes.append("its configure_optimizers is used, as no other optimizer was named")
    if isinstance(request.optimizer, Optimizer):
        make, note = copy_optimizer(request.optimizer, model)
        request = dataclasses.replace(request, optimizer=make)
        notes.append(note)
    if isinstance(request.parallelize, MeshPlan):
        plan = request.parallelize
        if plan.takes_precision and request.precision is not None:
            plan = dataclasses.replace(plan, precision=request.precision)
            request = dataclasses.replace(request, parallelize=plan, precision=None)
        notes += plan.describe(model)
        if request.compile is not None and not request.compile.as_is:
            notes.append(plan.describe_compiled(model))
    batch = fit_forward(model, request.args, request.kwargs)
    wrong = misnamed_input(model, batch.kwargs)
    if wrong and not torch_modules.has_hooks(model):  # a hook may take it
        raise UsageError(wrong)
    notes += batch.notes
    if batch.rest:
        tensors = [leaf for leaf in torch_common.tree_leaves(batch.rest) if isinstance(leaf, torch.Tensor)]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors) or "no tensor"
        notes.append(f"forward takes less than the batch: the rest ({shapes}; {nbytes} bytes) is left out")
    kept = tuple(dict.fromkeys((*request.notes, *notes)))
    return model, dataclasses.replace(request, args=batch.args, kwargs=dict(batch.kwargs), notes=kept)
