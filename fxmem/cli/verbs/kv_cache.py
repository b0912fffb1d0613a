"""How many tokens fit a serving engine's KV cache?

Predict a serving engine's start on one card or several: weights, the peak of its profile run, and the blocks of keys
and values that are left, by the arithmetic of a release. What only the card knows is named with what starts logged of
it; the answer is a range. Exit code 4 if nothing is left.

    fxmem kv-cache hf:Qwen/Qwen3-8B --target rtx4090
    fxmem kv-cache hf:meta-llama/Llama-3.1-70B --mesh tp=4 --quantize fp8 --context 4096,40960
"""

from __future__ import annotations

import argparse

from fxmem.cli.options import BESIDE, INPUTS, MODEL, STEP, TARGET, text_output
from fxmem.cli.output import layout, write_json
from fxmem.cli.parser import argument, flag, number
from fxmem.cli.progress import Progress
from fxmem.cli.step import require_torch, with_defaults
from fxmem.errors import UsageError
from fxmem.records.units import ENGINES, KV_DTYPES

_OF_THE_STEP = ("--weights", "--quiet")

ARGUMENTS = (
    MODEL,
    *(each for each in INPUTS if each.names[0] in ("--set", "--download")),
    *(each for each in STEP if each.names[0] in _OF_THE_STEP),
    TARGET,
    *BESIDE,
    argument("--engine ENGINE[@RELEASE]", default=ENGINES[0], help="vllm, sglang, or a release of it: vllm@0.19"),
    argument("--mesh tp=4[,pp=2]", help="how cards share the model: each layer by 4, 2 stages"),
    argument("--quantize", choices=("fp8",), help="linear layers quantised as they are loaded (vLLM's --quantization)"),
    argument("--kv-dtype", choices=KV_DTYPES, default=KV_DTYPES[0], help="of keys and values (--kv-cache-dtype)"),
    argument("--utilization SHARE", type=float, help="of the card's memory, for the engine (0.92)"),
    number("--max-batched-tokens", "tokens of a forward (8192 on a card of 70 GiB or more that is no A100, else 2048)"),
    number("--max-seqs", "sequences at a time (1024 on such a card, else 256)"),
    number("--block-size", "tokens of a block of the cache", default=16),
    argument("--context N[,N]...", default="2048,8192,32768", help="lengths of sequences of which to say how many"),
    flag("--eager", help="no CUDA graphs (vLLM's --enforce-eager)"),
    *text_output("result"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem kv-cache`; return the exit code and the text for stdout."""
    from fxmem.hardware import catalogue
    from fxmem.show.text.fits import serving_table

    options = with_defaults(options, STEP)
    card = catalogue.target(options.target)
    lengths = [word.strip() for word in options.context.split(",")]
    if not all(word.isdecimal() for word in lengths):
        raise UsageError(f"expected --context as numbers of tokens, 2048,8192; got {options.context!r}")
    with Progress(options.quiet) as progress:
        require_torch(options)
        progress("loading torch")
        from fxmem.cli.specs import build_model, parse_settings
        from fxmem.whatif.kv_cache import kv_cache

        progress(f"building {options.model}")
        built = build_model(
            options.model, parse_settings(options.settings), mode="infer", weights_dtype=options.weights
        )
        packed = None if options.weights or built.packed is None else built.packed.config
        found = kv_cache(
            built.module,
            engine=options.engine,
            utilization=options.utilization,
            max_batched_tokens=options.max_batched_tokens,
            max_seqs=options.max_seqs,
            block_size=options.block_size,
            mesh=options.mesh or "",
            kv_dtype=options.kv_dtype,
            quantization=options.quantize or packed,
            contexts=[int(word) for word in lengths],
            target=card,
            eager=options.eager,
            name=built.spec,
            notes=built.notes,
            progress=progress,
        )
    text = write_json(options, found.model_dump_json, lambda: serving_table(found, **layout(options)))
    return 0 if found.high_blocks else 4, text
