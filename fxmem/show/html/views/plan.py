"""A plan: what it does, its regions and the curve of all plans."""

from __future__ import annotations

from fxmem.records.plan import Plan
from fxmem.records.registry import VIEWS
from fxmem.show import facts
from fxmem.show.html.fragment import Code, Fragment, cell_id
from fxmem.show.html.sections import plan_curve, plan_facts
from fxmem.show.html.tables import effect_table, region_table


def view(plan: Plan) -> str:
    """Show a plan."""
    tables = [effect_table(plan.before, plan.after)]
    if any(plan.all_regions()):
        tables.append(region_table(plan))
    code = [Code("Edits of your source", plan.to_code())] if any(plan.all_regions()) else []
    return Fragment(
        [*facts.header_facts(plan), *plan_facts(plan)],
        tables,
        plan_curve(plan, cell_id(plan), 720.0) if plan.curve else "",
        code,
        [("Assumed", [each.text for each in plan.assumptions if each.topic == "plan"])],
    ).html()


VIEWS.register("plan", view)
