"""`fxmem generate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fxmem.cli.next_command import next_for_report
from fxmem.cli.options import INPUTS, KERNELS, MODEL, REPORT_OUTPUT, TARGET
from fxmem.cli.output import check_output, write_report
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress
from fxmem.cli.step import replace, require_torch
from fxmem.errors import UsageError
from fxmem.records.names import CACHES

if TYPE_CHECKING:
    from fxmem.cli.specs import BuiltModel
    from fxmem.simulation.generation import Generation

BRIEF = "peak memory of a generation, token by token"
DESCRIPTION = (
    "Predict the memory of model.generate() of transformers: prefill and decode, allocated and reserved, whether it "
    "fits and at which token it no longer does. A few tokens are recorded, the others are made by arithmetic; the "
    "allocator replays every one."
)

_BATCH, _PROMPT, _NEW = 1, 1024, 512
EXAMPLES = ("fxmem generate hf:GPT2LMHeadModel --prompt 512 --new 128 --batch 4",)

ARGUMENTS = (
    MODEL,
    *(each for each in INPUTS if each.names != ("--batch",)),
    argument("--batch", type=int, metavar="N", help=f"sequences at a time (default {_BATCH})"),
    argument("--prompt", type=int, metavar="TOKENS", help=f"length of the prompt (default {_PROMPT})"),
    argument("--new", type=int, default=_NEW, metavar="TOKENS", help="new tokens of each sequence"),
    argument(
        "--cache",
        choices=CACHES,
        default=CACHES[0],
        help="what keys and values are kept in",
    ),
    argument("--beams", type=int, default=1, metavar="N", help="beams of beam search"),
    flag("--sample", help="sample tokens rather than take the likeliest"),
    argument("--weights", choices=("bf16", "fp16"), help="cast the weights"),
    flag("--inference-mode", help="run under inference_mode, not no_grad"),
    *KERNELS,
    TARGET,
    flag("--quiet", help="no progress on stderr"),
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem generate`; return the exit code and the text for stdout."""
    check_output(options)
    for name, value in (("--batch", options.batch), ("--prompt", options.prompt), ("--new", options.new)):
        if value is not None and value < 1:
            raise UsageError(f"expected {name} of at least 1, got {value}")
    if options.beams < 1:
        raise UsageError(f"expected --beams of at least 1, got {options.beams}")
    if options.input and (options.batch is not None or options.prompt is not None):
        raise UsageError("--batch and --prompt are for the default inputs; with --input, write the sizes there")
    with Progress(options.quiet) as progress:
        generation = _generate(options, progress)
        report, timeline = generation.report(), generation.timeline
    return write_report(options, report, timeline, next_for_report(options.json or "-", report))


def _generate(options: argparse.Namespace, progress: Progress) -> Generation:
    from fxmem.hardware import catalogue

    card = catalogue.target(options.target)
    require_torch(options)
    progress("loading torch")
    from fxmem.cli.specs import build_model, parse_settings
    from fxmem.cli.specs.inputs import make_batch, parse_input
    from fxmem.simulation.generation import check_generates, choose_cache, generate_step
    from fxmem.simulation.kernel_settings import KernelSettings
    from fxmem.simulation.request import StepRequest

    specs = [parse_input(text) for text in options.input]
    progress(f"building {options.model}")
    built = build_model(options.model, parse_settings(options.settings), mode="infer", weights_dtype=options.weights)
    check_generates(built.module)
    specs = specs or _prompt(built, options)
    batch = make_batch(specs, weights_dtype=built.weights_dtype)
    request = StepRequest(
        args=batch.args,
        kwargs=dict(batch.kwargs),
        mode="infer",
        settings=KernelSettings(**{name: getattr(options, name) for name in KernelSettings.model_fields}),
        inference_mode=options.inference_mode,
        target=card,
        name=built.spec,
        notes=(*built.notes, *batch.notes),
    )
    ways = {"num_beams": options.beams, "do_sample": options.sample, **choose_cache(built.module, options.cache)}
    return generate_step(built.module, request, options.new, ways, options.cache, progress)


def _prompt(built: BuiltModel, options: argparse.Namespace) -> list[Any]:
    """The token ids of a prompt; with what else the model takes, where its configuration says it."""
    from fxmem.cli.specs.inputs import default_inputs

    batch, prompt = options.batch or _BATCH, options.prompt or _PROMPT
    found = [each for each in default_inputs(built, batch) if not (each.name or "").startswith("decoder_")]
    ids = [each for each in found if each.name == "input_ids"]
    if options.prompt is not None and not ids:
        raise UsageError(f"expected --input: {options.model} takes no token ids as its prompt")
    chosen = [replace(each, shape=(batch, prompt)) if each.name == "input_ids" else each for each in found]
    # As a tokenizer gives it.
    return [*chosen, *(replace(each, shape=(batch, prompt), name="attention_mask") for each in ids)]
