"""The arguments that several verbs have, as data."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from fxmem.cli.parser import OF_SUBJECT, Argument, argument, flag, grouped, number, repeatable, switch
from fxmem.cli.spec_names import SPEC_FORMS
from fxmem.errors import UsageError
from fxmem.records.units import (
    AS_IS,
    CACHES,
    PRECISIONS,
    QUANTIZE,
    STEPS,
    AnyMode,
    CompileMode,
    Mode,
    Precision,
    Sdpa,
    Values,
    ZeroGrad,
)

DEFAULT_BATCH = 8
DEFAULT_PROMPT = 1024

_OUTPUT = "what is shown and written"
_REPORT = "REPORT.json, which `fxmem analyze --json` wrote (of the step's options none applies then), or "

MODEL = argument("model MODEL", help=SPEC_FORMS)
MODEL_OR_REPORT = argument("model MODEL|REPORT.json", help=_REPORT + SPEC_FORMS)

INPUTS = grouped(
    OF_SUBJECT,
    repeatable(
        "--input SPEC",
        help="32x3x224x224[:dtype], name:8x1024:int64, batch.item:8x16 or pkg.mod:make_batch, which may be or "
        "return a DataLoader; repeatable; default: what the model's family takes. A head of transformers that trains "
        "gets its labels, too, unless --loss is given",
    ),
    number("--batch", f"batch size of the default inputs (default {DEFAULT_BATCH})", least=1),
    repeatable(
        "--set KEY=VALUE",
        dest="settings",
        help="a keyword argument of the factory, or a field of the hf: config; repeatable",
    ),
    flag("--download", help="of hf:ORG/NAME fetch config.json into the Hugging Face cache first; else nothing is"),
)
QUIET = flag("--quiet", "no progress on stderr")._replace(group=_OUTPUT)
KERNELS = grouped(
    "kernels",
    argument(
        "--sdpa",
        choices=get_args(Sdpa),
        help="the attention kernel that may run and no other, or auto: the first that can (default: as torch's flags "
        "are)",
    ),
    switch("--allow-tf32", "TF32 in float32 convolutions and recurrent networks (torch's default: allowed)"),
    switch("--cudnn-benchmark", "torch.backends.cudnn.benchmark, whose choice cannot be predicted (default: off)"),
    switch("--deterministic", "torch.use_deterministic_algorithms (default: off)"),
    argument(
        "--cudnn FOLDER",
        help="the folder of another cuDNN, which is asked for convolution workspaces (default: the installed one)",
    ),
)
"""Which kernels may run; without these, as torch's own flags are."""
STEP = grouped(
    "the step",
    *INPUTS,
    argument("--mode", choices=get_args(Mode), default="train", help="a training step, or forward under no_grad"),
    argument(
        "--loss ce|mse|bce|l1|FILE.py:NAME",
        help="a loss of torch, its labels made to fit, or a function of the output; default: the model's training_step "
        "if it has one, else the output's .loss, else the sum of its floating-point tensors",
    ),
    argument(
        "--optimizer NAME",
        default="adamw",
        help="a torch.optim class, sgd-momentum, adamw:fused, adamw:in-backward, torchao:AdamW8bit, pkg.mod:factory, "
        "or none",
    ),
    argument(
        "--zero-grad",
        default="after-step",
        choices=get_args(ZeroGrad),
        help="when gradients are cleared; before backward, those of the step before live through forward",
    ),
    switch("--set-to-none", "whether clearing gradients frees them, or fills them with zeros", default=True),
    switch(
        "--keep-outputs",
        "whether the loop's variables hold output and loss until those of the next step replace them; by default "
        "where it trains, as in most loops that people write but in transformers' Trainer",
    )._replace(variable="FXMEM_KEEP_OUTPUTS"),
    argument(
        "--values",
        choices=get_args(Values),
        default="bound",
        help="where the model asks for values: the largest shapes there can be, or what a real run on the CPU reads",
    ),
    flag("--inference-mode", help="with --mode infer: run under inference_mode, not no_grad"),
    argument(
        "--precision",
        type=lambda text: PRECISIONS.get(text.removeprefix("torch."), text) or text,
        choices=get_args(Precision),
        help="run under autocast",
    ),
    argument("--weights", choices=get_args(Precision), help="cast the weights; --quantize is for fewer bits"),
    repeatable(
        "--freeze PATH|PATTERN",
        help="a module's path, or a pattern of parameters' names (encoder.layer.*), that is not trained; repeatable",
    ),
    argument("--quantize", choices=QUANTIZE, help="quantise the linear layers' weights and freeze them (torchao)"),
    argument(
        "--lora r=8[,alpha=16,target=A+B]",
        help="train low-rank adapters alone (peft), over the quantised weights if there are any",
    ),
    flag("--channels-last", help="lay out weights and 4-d inputs as channels_last"),
    *KERNELS,
    QUIET,
)
"""The inputs of the model, and what the step does."""
TARGET = argument(
    "--target NAME|FILE.json",
    default="h100",
    help="the machine it is for: a card (see `fxmem doctor --targets`), a MIG instance or a share of one "
    "(h100:3g.40gb, h100:0.5), cpu, a size like 24GB, or a JSON file",
)._replace(variable="FXMEM_TARGET", group=OF_SUBJECT)
TORCH = argument(
    "--torch VERSION",
    help="the release of torch on it, e.g. 2.6: its workspaces, its rules for kernels, its cuDNN (default: the one "
    "installed)",
)._replace(group=OF_SUBJECT)
BESIDE = grouped(
    OF_SUBJECT,
    argument("--in-use SIZE", help="what other programs have of the card, as a desktop: 2GiB"),
    argument(
        "--os",
        choices=("linux", "windows"),
        help="the operating system there: Windows (and WSL) keeps a share of the card (default: linux)",
    ),
)
"""What else takes of the target."""
LOOP = grouped(
    "the step",
    number("--accumulate K", "micro-batches to one optimizer step; the step is the last of them", default=1),
    number("--prefetch", "further batches that wait on the card during the step", default=0),
    argument(
        "--checkpoints",
        choices=("blocks",),
        help="recompute each repeated block in backward, as gradient_checkpointing_enable() of transformers does",
    ),
)
"""The training loop around the step."""
COMPILE = grouped(
    "the compiler",
    argument(
        "--compile MODE",
        nargs="?",
        const="default",
        choices=(*get_args(CompileMode), AS_IS),
        help="the step as torch.compile would run it on the target, in this mode (default: default), or as-is: what "
        "the model's author compiled; builds no kernel",
    ),
    repeatable("--compile-option KEY=VALUE", help="dynamic=True, or an option of inductor; repeatable"),
)
"""Whether and how the step is compiled."""
RANKS = grouped(
    "many cards",
    number("--ranks", "how many ranks share the work; the step is that of one, with no peers and no network"),
    number("--rank R", "with --ranks: this one alone (default: each class of equal ranks)"),
)
"""The rank that is predicted."""
SHARDING = grouped(
    "many cards",
    argument(
        "--parallelize FILE.py:FN",
        help="with --ranks: your own function that shards the model (fully_shard, parallelize_module, ...)",
    ),
    argument(
        "--mesh fsdp=8[,tp=4,replicate=2]",
        help="a plan of ours over so many ranks, for who has no --parallelize: fully_shard on the repeated blocks, "
        "tensor parallel by the model's tp_plan, replicate beside fsdp for HSDP or alone for DDP; with fsdp, "
        "--precision is FSDP2's mixed precision",
    ),
    switch(
        "--reshard-after-forward", "with --mesh: free gathered parameters after forward (default: those of the blocks)"
    ),
    argument("--offload cpu", help="with --mesh: keep the shards in the host's memory (CPUOffloadPolicy)"),
)
"""How the model is sharded: by the user's own function, or by a plan of ours."""
ANALYSIS = (MODEL, *STEP, TARGET, TORCH, *BESIDE, *LOOP, *COMPILE, *RANKS, *SHARDING)
"""A model, and all that its analysis depends on."""
ANALYSIS_OR_REPORT = (MODEL_OR_REPORT, *ANALYSIS[1:])
"""The same, or a report that has it all."""

PROGRAM = grouped(
    OF_SUBJECT,
    argument(
        "--run PROGRAM",
        dest="run_program",
        nargs=argparse.REMAINDER,
        help="in the place of MODEL, and last: your own program (train.py or -m module) with its arguments, as for "
        "`fxmem run`",
    ),
)
"""A program in the place of a model; the last of a verb's arguments."""
HOST_MEMORY = argument(
    "--host-memory 64GiB",
    help="pinned memory of the host where a plan may let results of operators wait instead of recomputing them, copied "
    "while the card computes",
)
STEPS_OF_PROGRAM = number("--steps", f"with --run: optimizer steps of a run (default {STEPS})")._replace(
    group=OF_SUBJECT
)


def or_program(model: Argument) -> Argument:
    """The model, which may be left out for `PROGRAM`."""
    return argument(
        *model.names, **{**model.settings, "nargs": "?", "help": f"{model.settings['help']}; none with --run"}
    )


GENERATION = grouped(
    "a generation",
    number("--prompt TOKENS", f"length of the prompt (default {DEFAULT_PROMPT}, or what fits)", least=1),
    number("--new TOKENS", "new tokens of each sequence", least=1, default=512),
    argument("--cache", choices=CACHES, default=CACHES[0], dest="kv_cache", help="what keys and values are kept in"),
    number("--beams", "beams of beam search", least=1, default=1),
    flag("--sample", help="sample tokens rather than take the likeliest"),
)
"""What transformers' `generate` is told."""


def or_generation(*arguments: Argument) -> tuple[Argument, ...]:
    """The arguments of a step, whose mode may be a generation, and those of one."""

    def widen() -> Iterator[Argument]:
        for each in arguments:
            if each.dest != "mode":
                yield each
                continue
            help = "a training step, forward under no_grad, or generate() of transformers token by token"
            changes = {"choices": get_args(AnyMode), "help": f"{help} (default {each.settings['default']})"}
            yield each._replace(settings={**each.settings, **changes})

    return (*widen(), *GENERATION)


SUBJECT = (or_program(MODEL_OR_REPORT), *or_generation(*ANALYSIS[1:]), STEPS_OF_PROGRAM, *PROGRAM)
"""Whatever may be asked about: a model's step or generation, a report of one, a program."""
RUNNABLE = (or_program(MODEL), *SUBJECT[1:])
"""The same without reports: what can run again."""

OPEN = flag("--open", "open what was written, in the browser or what the system has for it")
PLAN = argument(
    "--plan PLAN.json",
    help="a plan for this step, which `fxmem plan --json` wrote; the model and its options may then be left out",
)
OVERLAYS = (
    PLAN,
    argument("--budget BYTES|8GiB|60%", help="drawn as a line; a share is of the step's peak"),
    argument("--after REPORT.json", help="report of the same step with a plan, drawn as a line over it"),
)
"""What a plot shows beside the step."""


def drawing(max_boxes: str) -> Argument:
    """The argument of a drawn graph, with this help."""
    return number("--max-boxes", f"{max_boxes}; 25 are one screen", least=0, default=25)


Forms = Mapping[str | None, Sequence[Argument]]
"""The options of each value of `--by`; None is for where it is not given."""


def by_form(forms: Forms, help: str) -> Argument:
    """The argument that chooses one of the forms in which a verb shows a step; `lines` is `line`."""
    singular = {f"{form}s": form for form in forms}
    return argument("--by", type=lambda word: singular.get(word, word), choices=[*filter(None, forms)], help=help)


def check_form(options: argparse.Namespace, forms: Forms) -> None:
    """Refuse an option that the form does not have that `--by` chooses."""
    chosen = forms[options.by]
    for each in itertools.chain(*forms.values()):
        if each not in chosen and each.is_given(options):
            ways = (f"with --by {form}" if form else "without --by" for form, having in forms.items() if each in having)
            raise UsageError(f"expected {each.names[-1]} {' or '.join(ways)}")


def text_output(document: str) -> tuple[Argument, ...]:
    """How wide the table for stdout is, and where the document goes as JSON."""
    json = f"write the {document} as JSON; `-` writes it to stdout instead of the table"
    return (width(), argument("--json FILE|-", help=json))


def width(text: str = "table") -> Argument:
    """How wide the text for stdout is."""
    help = f"width of the {text} (default: the terminal's)"
    return number("--width COLUMNS", help, least=60)._replace(variable="FXMEM_WIDTH")


REPORT_OUTPUT = grouped(
    _OUTPUT,
    flag("--full", "everything: each count of the peak, its split, the largest tensors, what is assumed and unknown"),
    number("--depth", "levels of the module tree to show (default: 2; with --full all)", least=0),
    flag("--check", "refuse a target whose memory is not known, which no step can be said to fit"),
    *text_output("report"),
    argument("--svg FILE.svg", help="also write the annotated graph; `fxmem graph` has more to choose"),
    argument("-o", "--html FILE.html", help="also write the page; `fxmem report` has more to choose"),
)
"""The table of a report, and the files written beside it."""
