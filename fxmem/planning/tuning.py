"""The numbers that the planners are tuned with: what each trades, and what it rests on.

As a whole they are measured by `benchmarks/planning/planning_speed.py` (time of a plan, which budgets are reached) and
`benchmarks/planning/plans.py` (peaks and FLOPs beside other planners); both write to `benchmarks/results`. Where
nothing more is said of a number by itself, it was chosen and not measured.
"""

from __future__ import annotations

from typing import Final

# --- the search for a plan, whatever the planner ----------------------------------------------------------------------

ATTEMPTS: Final = 8
"""Times a planner is asked for less before its proposals count as not reaching the budget. Chosen, not measured."""
HOPED: Final = 1.03
"""Asked for so many times the bytes, a planner of regions gives the least time that its search can end at.

Planners estimate too many bytes, and are asked again for what a plan leaves unused. Measured: of 75 such searches, for
7 models on two cards, 70 ended at no less time than that, 5 at up to 2 % less.
"""
OVERESTIMATED: Final = 1.1
"""How many times the bytes of a plan's analysis its planner may have estimated. Measured: the most of 422 plans for 12
models."""
EXACT_ERROR: Final = 50
"""By what part of a budget a plan for single operators may turn out to need less than was estimated. Measured: four
times as much as has been seen."""
FRAGMENT: Final = 16
"""What part of a budget is asked for less when the allocator runs out of it by fragmentation. Chosen, not measured."""
USED_UP: Final = 200
"""A budget is used up when less than this part of it is left. Chosen, not measured."""
SECONDS_DIGITS: Final = 9
"""Of seconds that are compared. Follows from floats: sums of the same times differ in their last digits."""
ANALYSED_CURVE_POINTS: Final = 12
"""Plans on a curve that are analysed, at most, for each application. Chosen, not measured."""

# --- regions ----------------------------------------------------------------------------------------------------------

MOST_CUTS: Final = 320
"""Cuts of a graph that are considered; beyond, those after the lightest ops are left out. Chosen, not measured: the
tables grow with their square."""
MOST_MODULE_CUTS: Final = 1500
"""Cuts at modules' borders that are considered. Chosen, not measured: the tables grow with their square."""
LONGEST_SLICE: Final = 64
"""Children in a slice of a Sequential, at most. Chosen, not measured."""
NESTED_UNITS: Final = 128
"""Units that the nested planner tells apart. Chosen, not measured: its time grows with their cube."""
FRONT: Final = 256
"""Points of a front of bytes against cost, at most. Chosen, not measured."""
FRONT_STEPS: Final = 1024
"""Of bytes kept, by which most points that are not on a front are told before any are sorted. Chosen, not measured; it
changes the time alone."""
SLOTS: Final = 200
"""Equal steps of memory that a budget of nested regions is divided into. Chosen, not measured: time against bytes that
rounding up leaves unused."""
SLOTS_ABOVE: Final = 8
"""Slots above a budget that are solved with it, for a search asks for several. Chosen, not measured."""
NEAR_BUDGETS: Final = 0.8
"""The share of a solved budget down to which other budgets are near. Chosen, not measured."""
FINER: Final = 2
"""Times that the smallest budget of nested regions is looked for, each in finer slots than before. Chosen, not
measured."""
ROUNDED: Final = 1.05
"""By what factor regions may need more in slots than in bytes. Chosen, not measured."""
IN_STEPS: Final = 1.03
"""How many times a budget is asked for where no regions within regions keep it in whole steps of memory. Chosen, not
measured."""
ASKED_AGAIN: Final = 3
"""Times that a strategy is asked again for what its regions leave unused of a budget. Chosen, not measured."""
REGION_CURVE_POINTS: Final = 14
"""Budgets that a curve is made of. Chosen, not measured."""
LEVELS: Final = 6
"""Levels above 0 of products whose results regions keep, at most. Chosen, not measured: each has tables of its own."""
LEVELS_MANY_UNITS: Final = 500
"""Units from which on there are fewer levels. Chosen, not measured: the tables grow with the square of the units."""
LEVELS_OF_MANY: Final = 2
"""Levels for so many units. Chosen, not measured."""
TRAFFIC_FLOPS: Final = 0.5
"""FLOPs that a byte written counts as in the planners' cost, where the card's rates are not known. Chosen, not
measured: enough to prefer, of two plans of equal FLOPs, the one that moves less."""
COST_PER_SECOND: Final = 1e15
"""Units of the planners' cost in a second of the step, where rates are known. Follows from the other unit: about as
many as FLOPs."""
TICKS_TOGETHER: Final = 256
"""Ticks whose bytes are summed together. Chosen, not measured: their table stays within a processor's cache."""
STATEMENT_LINES: Final = 30
"""Lines of a statement, at most, that are read for an edit. Chosen, not measured."""

# --- single operators -------------------------------------------------------------------------------------------------

LARGE_STEP: Final = 1000
"""Calls from which on less is tried. Chosen, not measured by itself; with it a plan for a Llama of 80 layers takes
2.6 s of CPU time (`benchmarks/results/planning-2026-11-25.md`)."""
CUTS: Final = 60, 12
"""Cuts that are made for any budget, at most and at least. Chosen, not measured."""
CUT_CALLS: Final = 60_000
"""Calls of all graphs that are cut together, in between. Chosen, not measured."""
CUTS_PER_PRICE: Final = 3
"""Cuts for each price of a FLOP, the prices of bytes following the peak. Chosen, not measured."""
NEAR_PEAK: Final = 0.02
"""What share of the peak a moment may lie below it and still count by a factor of 1/e. Chosen, not measured."""
LARGEST_CAPACITY: Final = 1 << 28
"""What the largest value counts as in a cut. Follows from the 32 bits that capacities have; what is larger than them
counts as endless."""
ASCENT_STEPS: Final = 80, 20
"""Cuts that are made for one budget: of graphs of fewer than `LARGE_STEP` calls, and of others. Chosen, not
measured."""
ASCENT_RATE: Final = 10.0
"""By how many times the share it is over the budget a moment's price goes up in the first of them, as a power of e.
Chosen, not measured."""
ASCENT_SLOWS: Final = 5.0
"""After how many steps it goes up by 0.7 of that. Chosen, not measured."""
ASCENT_LARGEST: Final = 0.7
"""By which power of e a price changes in one step at most. Chosen, not measured."""
ASCENT_LEAST_PRICE: Final = 1e-5
"""What part of the highest price the others have at least. Chosen, not measured."""
MIXED: Final = 4, 2
"""Choices on either side of a budget that are mixed with each other, of small graphs and of large ones. Chosen, not
measured."""
SETTLED: Final = 8, 3
"""Of what keeps the budget, how many are made cheaper, of small graphs and of large ones. Chosen, not measured."""
MOVES: Final = 3_000_000
"""Changes of choices that are tried, times what one takes: calls of the step, and `MOVE_OVERHEAD` more; of more than
`MOVES_MANY_CALLS` calls their square over that. Chosen, not measured by itself; as for `LARGE_STEP`."""
MOVE_OVERHEAD: Final = 250
"""Calls that trying a change takes as long as, beside the step's own. Chosen, not measured."""
MOVES_MANY_CALLS: Final = 1500
"""Calls from which on a change takes longer than they do in proportion. Chosen, not measured."""
MOVES_ABREAST: Final = 6
"""Of the calls that free most for their cost, how many are tried at a time. Chosen, not measured."""
REPAIRS: Final = 24
"""Changes that are tried to make up for a call that is spared. Chosen, not measured."""
SEED_SHARES: Final = (1.0,), (0.97, 1.05, 1.1)
"""Of a budget, for which the planner of regions is asked for plans to begin from; the second ones where nothing was
found with the first. Chosen, not measured."""
NESTED_SHARES: Final = (1.05, 1.0, 0.95, 0.9), (1.0, 0.9)
"""Of a budget, for which regions within regions are asked for; the second ones of large steps. Chosen, not measured."""
NEARLY_LOWEST: Final = 1.01
"""Times the lowest peak that still counts as the lowest. Chosen, not measured."""
IN_REACH: Final = 1.02
"""Times a budget, above which the lowest peak found is taken to be out of its reach. Chosen, not measured."""
FOLLOWED: Final = 128
"""Choices that run calls more than once whose backward is remembered, the latest. Measured: of 4,091 for a ResNet-50,
652 are come to again; without a limit 921, for up to 0.2 GB."""
OPERATOR_CURVE_POINTS: Final = 12
"""Budgets on a curve. Chosen, not measured."""
WAITS: Final = 0.01, 0.1
"""Shares of the unplanned step that a plan may wait for copies to the host; where no such plan keeps a budget, any wait
will do. Chosen, not measured."""
OFFLOAD_LEAST_BYTES: Final = 1 << 20
"""Bytes of the smallest result that is offloaded: a copy takes Python time, too. Chosen, not measured."""
OFFLOAD_MOST_VALUES: Final = 600
"""Results that are looked at for offloading, the largest. Chosen, not measured."""
