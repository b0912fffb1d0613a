"""Where do activation checkpoints go?

Choose activation checkpoints that keep a training step within a budget at the least recomputation, apply them to a
stand-in of the model and analyse it again. Without --budget: the whole curve of peak against extra FLOPs. Of a program
(--run) modules are planned, and it runs again with each plan that is tried. From a report, without torch, the peak is
an estimate. With --compile: the activation_memory_budget of torch.compile that keeps the budget, beside these.

    fxmem plan torchvision:resnet50 --budget 60%
    fxmem plan model.py:build --input 8x64 --budget 8GiB --json plan.json
    fxmem plan report.json --budget 60%
    fxmem plan model.py:build --input 8x64 --compile --budget 60%
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import ANALYSIS, HOST_MEMORY, MODEL_OR_REPORT, PROGRAM, STEPS_OF_PROGRAM, or_program, text_output
from fxmem.cli.output import layout, write_drawing, write_json
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_model, analyze_subject, check_host_memory, is_report, read_budget, read_program
from fxmem.errors import ExceededError, UsageError
from fxmem.records.registry import STRATEGIES
from fxmem.records.units import Application

if TYPE_CHECKING:
    from fxmem.cli.step import ProgramWords
    from fxmem.memory.budget import Budget, BudgetShare
    from fxmem.records.plan import CompilePlan, Plan
    from fxmem.records.profile import Profile, Timeline

ARGUMENTS = (
    or_program(MODEL_OR_REPORT),
    *ANALYSIS[1:],
    argument(
        "--budget BYTES|8GiB|60%",
        help="what the step may take; in bytes, at most what a CUDA context leaves of the target; a share is of its "
        "peak without a plan; exit code 4 if no plan keeps it, or the planned step does not fit the target",
    ),
    argument(
        "--strategy",
        choices=STRATEGIES,
        metavar=f"{{{','.join(STRATEGIES.briefs)}}}",
        default="auto",
        help="how regions are chosen; auto: the cheapest",
    ),
    argument(
        "--application",
        choices=[each.value for each in Application],
        help="modules: whole modules run again; graph: regions begin and end anywhere, the forward is rewritten; "
        "operators: single results are recomputed, the program runs once (default: whichever is cheapest)",
    ),
    HOST_MEMORY,
    flag(
        "--code",
        "print the edits of your own source instead of the table; without --application the plan is of modules that "
        "an edit of a line checkpoints",
    ),
    *text_output("plan"),
    argument("--svg FILE.svg", help="also write the annotated graph, the plan's regions boxed"),
    STEPS_OF_PROGRAM,
    *PROGRAM,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem plan`; return the exit code and the text for stdout."""
    from fxmem.show import graph
    from fxmem.show.text import plan as plan_reporting

    budget = read_budget(options)
    if options.compile is not None and options.run_program is None:
        return _plan_compiled(options, budget)
    program = read_program(options)
    check_host_memory(options, of_model=program is None and not is_report(options.model))
    if program is None and is_report(options.model):
        plan, profile, timeline = _plan_report(options, budget)
    else:
        plan, profile, timeline = _plan_step(options, program, budget)
    if options.svg is not None:
        write_drawing(options, options.svg, graph.render(profile, timeline, graph.DrawingOptions(plan=plan)).svg)
    return _exit_code(plan), write_json(
        options,
        plan.to_json,
        lambda: _write_code(options, plan) if options.code else plan_reporting.table(plan, **layout(options)),
    )


def _exit_code(plan: Plan | CompilePlan) -> int:
    """4 where the planned step does not fit the target, or an estimate exceeds the budget."""
    from fxmem.show.facts import compare_with_target

    is_exceeded = plan.budget_bytes is not None and plan.after.counted_bytes > plan.budget_bytes
    return 4 if is_exceeded or compare_with_target(plan, plan.after)[0] is False else 0


def _write_code(options: argparse.Namespace, plan: Plan) -> str:
    """The edits, after what they are worth."""
    from fxmem.records.units import format_bytes
    from fxmem.show.plan_facts import describe_saving, effect_facts, summarize

    worth = f"; {describe_saving(plan)}" if plan.regions else ""
    peak = f"Peak: {format_bytes(plan.before.counted_bytes)} -> {format_bytes(plan.after.counted_bytes)}"
    facts = (f"{fact.label}: {fact.text}" for fact in effect_facts(plan))
    head = "".join(f"# {line}\n" for line in (summarize(plan) + worth, peak, *facts))
    return f"{head}\n{plan.to_code(None if options.json in (None, '-') else options.json)}"


def _plan_compiled(options: argparse.Namespace, budget: Budget | BudgetShare | None) -> tuple[int, str]:
    """The `activation_memory_budget` of a compiled step."""
    from fxmem.show.text import plan as reporting

    given = [f"--{name}" for name in ("application", "code", "svg") if getattr(options, name)]
    given += ["--host-memory"] if options.host_memory else []
    given += ["--strategy"] if options.strategy != "auto" else []
    if given:
        raise UsageError(f"expected --compile without {given[0]}: the compiler decides itself what it recomputes")
    if is_report(options.model):
        raise UsageError("expected --compile with a model: its step is compiled anew for each try")
    if budget is None:
        raise UsageError("expected --compile with --budget: what the compiled step may take")
    with Progress(options.quiet) as progress:
        analysis = analyze_model(options, progress)
        from fxmem.whatif.verified_plan import plan_compiled

        plan = plan_compiled(analysis, budget, progress)
    return _exit_code(plan), write_json(
        options, plan.model_dump_json, lambda: reporting.budget_table(plan, **layout(options))
    )


def _plan_step(
    options: argparse.Namespace, program: ProgramWords | None, budget: Budget | BudgetShare | None
) -> tuple[Plan, Profile, Timeline]:
    with Progress(options.quiet) as progress:
        step = analyze_subject(options, program, progress)
        from fxmem.whatif import verified_plan

        find = functools.partial(
            verified_plan.plan, step, options.strategy, budget, progress=progress, host_memory=options.host_memory
        )
        if not options.code or options.application is not None:
            plan = find(application=options.application)
        else:
            try:
                plan = find(edits_only=True)
            except ExceededError:
                plan = find(application=Application.MODULES)
    return plan, step.profile, step.timeline


def _plan_report(options: argparse.Namespace, budget: Budget | BudgetShare | None) -> tuple[Plan, Profile, Timeline]:
    from fxmem.memory import report_reader
    from fxmem.planning import estimate

    report = report_reader.load_report(Path(options.model))
    timeline = report_reader.timeline(report)  # refuses a peak that is not the report's, before a share of it is taken
    application = Application.MODULES.value if options.code and not options.application else options.application
    return estimate.estimate(report, report.peak, options.strategy, budget, application), report, timeline
