"""What each step, or each batch of an evaluation, leaves on the card: predictions, losses with their graph, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.memory.findings import Finding, register
from fxmem.records.findings import BytesOf
from fxmem.records.parts import Growth, find_large
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes

_GRAPH = "graph of "


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each owner without a bound, of at least a hundredth of all."""
    program = profile.step.program
    if program is None:
        return
    for each in _find_endless(program.grown):
        yield _describe(each, "step", "after each step")
    for evaluation in program.evaluations:
        batches, when = evaluation.batches, f"after each batch of the evaluation at {evaluation.place}"
        for each in _find_endless(evaluation.grown):
            sum_of_all = "" if batches is None else f", about {format_bytes(batches * each.nbytes)} of {batches:,}"
            yield _describe(each, "batch", f"{when}{sum_of_all}")


def _find_endless(grown: Sequence[Growth]) -> list[Growth]:
    return find_large([each for each in grown if each.until is None])


def _describe(grown: Growth, of: BytesOf, when: str) -> Finding:
    is_graph = grown.is_graph
    what = "what backward needs of it" if is_graph else "more"
    return Finding(
        cause="kept-results",
        text=f"{grown.holder.removeprefix(_GRAPH) or 'torch'} keeps {what} {when}",
        place=grown.kept_at or grown.made_at,
        nbytes=grown.nbytes,
        of=of,
        change=_find_change(grown, is_graph=is_graph),
    )


def _find_change(grown: Growth, *, is_graph: bool) -> str:
    if grown.holder.rpartition(".")[0] in ("all_preds", "all_labels", "all_losses", "all_inputs"):
        return "eval_accumulation_steps=1 in TrainingArguments, or preprocess_logits_for_metrics of the Trainer"
    return ".item() or .detach() of what is kept" if is_graph else ".cpu() of what is kept, or keep less of it"


register("kept-results", find)
