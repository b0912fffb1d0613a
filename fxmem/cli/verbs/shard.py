"""How many cards, and in which mesh?

Find the meshes of FSDP2, tensor parallel and replicas in which a training step fits so many cards, or the fewest cards
that it fits, the cheapest communication first, each with its micro-batch. What is shown was analysed whole; a lower
bound from two and three of the model's blocks rules out the others. Exit code 4 if nothing fits.

    fxmem shard hf:meta-llama/Llama-3.1-8B --cards h100 --seq 4096 --batch 64
    fxmem shard hf:LlamaForCausalLM --cards 64xh100 --seq 8192 --batch 512
    fxmem shard model.py:build --input 1x3x224x224 --cards 8xrtx4090 --batch 256
"""

from __future__ import annotations

import argparse

from fxmem.cli.options import MODEL, SHARDING, STEP, text_output
from fxmem.cli.output import layout, write_json
from fxmem.cli.parser import argument, number
from fxmem.cli.progress import Progress, say
from fxmem.cli.step import build_step, replace, require_torch, step_request
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes

ARGUMENTS = (
    MODEL,
    *(each for each in STEP if each.names[0] not in ("--batch", "--mode", "--inference-mode")),
    argument("--cards 64xh100|h100", help="how many of which card, or as few of 1, 2, 4, ... as it fits"),
    number(
        "--batch",
        "batch size of an optimizer step on all cards, which ranks and micro-batches share",
        dest="global_batch",
    ),
    number("--seq", "length of the sequences: dimension 1 of token ids, masks and labels"),
    number("--show", "look for so many meshes that fit", default=3),
    *SHARDING[-2:],
    *text_output("result"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem shard`; return the exit code and the text for stdout."""
    from fxmem.show.text.fits import fits_table

    for name, value in (("--cards", options.cards), ("--batch", options.global_batch)):
        if value is None:
            raise UsageError(f"expected {name}, e.g. fxmem shard MODEL --cards 64xh100 --batch 512")
    require_torch(options)
    with Progress(options.quiet) as progress:
        progress("loading torch")
        from fxmem.simulation.ranks import Mesh, MeshPlan, check_offload
        from fxmem.whatif import shard, source

        count, target = shard.read_cards(options.cards)
        check_offload(options.offload)
        options.mode, options.inference_mode, options.batch = "train", False, None
        request = step_request(options, target=target)
        built, args, kwargs = build_step(options, progress)
        if options.seq is not None:
            args, kwargs = source.resize_sequences(built.module, args, kwargs, options.seq)
        fits = shard.find_meshes(
            built.module,
            replace(request, args=args, kwargs=kwargs, name=built.spec, notes=built.notes),
            count,
            options.global_batch,
            MeshPlan(Mesh(fsdp=2), options.reshard_after_forward, options.offload is not None),
            shown=options.show,
            progress=progress.found,
        )
    text = write_json(options, fits.model_dump_json, lambda: fits_table(fits, **layout(options)))
    if not fits.fitting:
        say(f"expected a mesh that fits {format_bytes(fits.points[0].room_bytes)} a card; none does")
    return (0 if fits.fitting else 4), text
