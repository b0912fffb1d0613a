"""What each step, or each batch of an evaluation, leaves on the card: predictions, losses with their graph, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.memory.findings import WORTH_SAYING, Finding
from fxmem.records.findings import BytesOf
from fxmem.records.parts import ANEW, OWN_GRAPH, Growth, find_large
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import OF_FRAMES, OF_GRAPH, format_bytes


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each owner without a bound, of at least a hundredth of all; where it is known when it ends, of what
    by then is worth saying."""
    program = profile.step.program
    if program is None:
        return
    least = timeline.peak.requested_bytes // WORTH_SAYING
    for each in _find_endless(program.grown):
        if each.last is not None and each.nbytes * each.last < least:
            continue
        yield _describe(each, "step", "after each step")
    for each in find_large(program.grown_anew):
        of_former = _describe(each, "optimizer", ANEW)
        yield of_former.model_copy(update={"change": "del of a former model; cache_clear() of a cached function"})
    for evaluation in program.evaluations:
        batches, when = evaluation.batches, f"after each {evaluation.of} of the {evaluation.title}"
        for each in _find_endless(evaluation.grown):
            if batches is not None and batches * each.nbytes < least:
                continue
            is_known = each.is_endless or not evaluation.is_carried_on
            nbytes = batches and is_known and batches * each.nbytes
            sum_of_all = f", about {format_bytes(nbytes)} of {batches:,}" if nbytes else ""
            yield _describe(each, evaluation.of, f"{when}{sum_of_all}")


def _find_endless(grown: Sequence[Growth]) -> list[Growth]:
    return find_large([each for each in grown if each.until is None and (each.holder or each.is_endless)])


def _describe(grown: Growth, of: BytesOf, when: str) -> Finding:
    what = "more"
    if grown.is_graph:
        what = "what backward needs of it"
    elif grown.holder == OWN_GRAPH:
        what = "all that leads to it"
    elif grown.is_frames:
        what = "exceptions, and with each the variables of the functions it came through,"
    elif grown.times > 1:
        what = f"a view, and with it {grown.times} times its bytes,"
    return Finding(
        cause="kept-results",
        text=f"{grown.keeper.removeprefix(OF_GRAPH).removeprefix(OF_FRAMES)} keeps {what} {when}",
        place=grown.kept_at or grown.made_at,
        nbytes=grown.nbytes,
        of=of,
        change=_find_change(grown),
    )


def _find_change(grown: Growth) -> str:
    if grown.holder == OWN_GRAPH:
        return (
            "torch.autograd.grad(..., create_graph=True), which keeps none, in its place; or .grad = None after its use"
        )
    if not grown.holder:
        return ".detach() of a result in the saved-tensor hook, or the attribute of ctx, that keeps it with its graph"
    if grown.holder.rpartition(".")[0] in ("all_preds", "all_labels", "all_losses", "all_inputs"):
        return "eval_accumulation_steps=1 in TrainingArguments, or preprocess_logits_for_metrics of the Trainer"
    if grown.is_graph:
        return ".item() or .detach() of what is kept"
    if grown.is_frames:
        return "str(error), or error.with_traceback(None), in the place of the exception"
    return f"{'.clone() or ' if grown.times > 1 else ''}.cpu() of what is kept, or keep less of it"
