"""A plan: what it does, its regions and the curve of all plans."""

from __future__ import annotations

from fxmem.records.plan import Plan
from fxmem.show.facts import header_facts
from fxmem.show.html.page import cell_id, fragment
from fxmem.show.html.sections import plan_curve
from fxmem.show.html.tables import region_table
from fxmem.show.plan_facts import effect_facts, effect_table, summarize
from fxmem.show.sections import Fact, Section


def view(plan: Plan) -> str:
    """Show a plan."""
    return fragment(
        Section(facts=[*header_facts(plan), Fact("Plan", summarize(plan))]),
        Section(effect_table(plan.before, plan.after, plan, by_kind=True), list(effect_facts(plan))),
        *([Section(region_table(plan))] if plan.regions else []),
        plot=plan_curve(plan, cell_id(plan), 720.0) if plan.curve else "",
        codes=[("Edits of your source", plan.to_code(), "")] if plan.regions else [],
        lists=[("Assumed", [each.text for each in plan.assumptions if each.topic == "plan"])],
    )
