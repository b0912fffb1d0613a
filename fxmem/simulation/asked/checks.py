"""Which way a program's own check goes when all is well: away from the line that raises.

`if (labels < 0).any(): raise ValueError(...)` and `assert mask.all()` ask for a value that no run without data has, and
do nothing with it but end the program; so do a function that is called and raises, and one whose answer is checked
(`if not is_increasing(times): raise`). What is asked is found by its place: the instruction that a frame is at has the
columns of the expression it belongs to (PEP 657).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.asked import known_values

Place = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column."""
_Wanted = Callable[[ast.AST, frozenset[str]], Iterator[tuple[ast.AST, ast.expr, bool]]]
"""Of a node, and the names of functions that raise: what is asked, by which condition, and the truth that is wanted."""


def find_passing_value(frame: types.FrameType) -> bool | None:
    """The truth with which the check that `frame` is at is passed, or that its callers are at, whose answer it gives;
    None where it is at no check, or its source cannot be read."""
    passes = _find(frame, _wanted_by_check)
    if passes is None and frame.f_back is not None and (answers := _find(frame, _wanted_to_return_true)) is not None:
        asked = find_passing_value(frame.f_back)
        return None if asked is None else answers == asked
    return passes


def find_going_on_value(frame: types.FrameType) -> bool | None:
    """The truth with which a program goes on after the `if` that `frame` is at.

    It leaves neither its loop nor its function, and else does what it asks for. None where it is at no `if`, or its
    source cannot be read.
    """
    return _find(frame, _wanted_to_continue)


def is_in_while(frame: types.FrameType) -> bool:
    """Whether the innermost loop around the line that `frame` is at is a `while`, which need not end."""
    return frame.f_lineno in _lines_in_while(frame.f_code.co_filename)


def _find(frame: types.FrameType, wanted_by: _Wanted) -> bool | None:
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), None)
    return None if place is None else _places(code.co_filename, wanted_by).get(place)


def _wanted_by_check(node: ast.AST, raisers: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """The condition of a statement that checks, and the truth value that passes; of a function that else raises, those
    of its `if ...: return`."""
    match node:
        case ast.Assert(test=test):
            yield node, test, True
        case ast.If(test=test) if _raises(node.body, raisers):
            yield node, test, False
        case ast.If(test=test) if _raises(node.orelse, raisers):
            yield node, test, True
        case ast.Call(func=ast.Attribute(attr="_assert"), args=[test, *_]):
            yield node, test, True
        case ast.FunctionDef(body=body) if _raises(body, raisers):
            for each in body:
                if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return) and not each.orelse:
                    yield each, each.test, True


def _wanted_to_return_true(node: ast.AST, _: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """What a function returns, or `all` and `any` go through, and the truth value with which that is true."""
    match node:
        case ast.Return(value=ast.expr() as value):
            yield node, value, True
        case ast.If(test=test, body=[ast.Return(value=ast.Constant(value=bool() as answer))]):
            yield node, test, answer
        case ast.Call(func=ast.Name(id="all" | "any"), args=[ast.GeneratorExp(elt=each) | ast.ListComp(elt=each)]):
            yield each, each, True


def _wanted_to_continue(node: ast.AST, _: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """The condition of an `if`, and the truth value with which the program goes on."""
    if isinstance(node, ast.If):
        yield node, node.test, not isinstance(node.body[-1], (ast.Break, ast.Continue, ast.Raise, ast.Return))


def _parse(file: str) -> ast.Module:
    """The source of a file; nothing where it is none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=32)
def _places(file: str, wanted_by: _Wanted) -> dict[Place, bool]:
    """By the place of each condition in a file, the truth value that is wanted."""
    found: dict[Place, bool] = {}

    def note(node: ast.AST, test: ast.expr, wanted: bool) -> None:
        conditions = list(_conditions(test, wanted))
        found.update(conditions)
        if len({truth for _, truth in conditions}) == 1:  # Python 3.11 gives a jump the place of the whole statement
            found[_place(cast("ast.expr | ast.stmt", node))] = conditions[0][1]

    nodes = list(ast.walk(_parse(file)))
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef) and _raises(each.body, frozenset())]
    raisers = {each.name for each in functions if not any(isinstance(inner, ast.Return) for inner in ast.walk(each))}
    for node in nodes:
        for asked in wanted_by(node, frozenset(raisers)):
            note(*asked)
    return found


@functools.lru_cache(maxsize=32)
def _lines_in_while(file: str) -> frozenset[int]:
    found: set[int] = set()
    for node in ast.walk(_parse(file)):  # what is inside comes after what is around it
        match node:
            case ast.While():
                found.update(range(node.lineno, _last_line(node) + 1))
            case ast.For() | ast.AsyncFor() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                found.difference_update(range(node.lineno, _last_line(node) + 1))
    return frozenset(found)


def _last_line(node: ast.expr | ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _conditions(test: ast.expr, wanted: bool) -> Iterator[tuple[Place, bool]]:
    """What a condition consists of. One operand of `and` or `or` that is as the whole should be never keeps the whole
    from it."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _conditions(operand, not wanted)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _conditions(value, wanted)
        case ast.Call(func=ast.Name(id="bool"), args=[operand]):
            yield _place(test), wanted
            yield from _conditions(operand, wanted)
        case _:
            yield _place(test), wanted


def _place(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _raises(body: Sequence[ast.stmt], raisers: frozenset[str]) -> bool:
    """Whether statements end in one that raises, or that calls a function of the file's own that does."""
    match body[-1] if body else None:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=False)):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="_assert"), args=[ast.Constant(value=False), *_])):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            # unittest, pytest, torch.testing; sys.exit
            return name in raisers or name in ("fail", "_fail", "exit")
    return False


# --- no sequence ends before the last token: what `generate` is answered where it asks whether all have ended ---------
# transformers' loops (transformers/generation/utils.py) end when every sequence has met a stopping criterion. Which
# token was chosen is not known without weights. A generation that is not cut short takes the most memory; so the
# criteria that look at tokens are answered "not yet", and those that count tokens are left as they are. Whisper,
# which looks at what was generated, finds words and no timestamps; an assistant drafts as much as it may, and none of
# it is accepted.


ASSUMED: Final = "no sequence ends before the last token: stopping criteria that look at tokens are not met"
DRAFTS_ASSUMED: Final = "an assistant's drafts are as long as they may be, and no token of them is accepted"
_CRITERIA: Final = "transformers.generation.stopping_criteria"
_LOOPS: Final = "transformers.generation.utils"
_WHISPER: Final = "transformers.models.whisper.generation_whisper"
_Call = Callable[..., Any]
"""What another function stands for."""


class StopRule:
    """The answers to a library's stopping criteria; a context manager that takes its patches back when left."""

    def __init__(self) -> None:
        self.was_asked = False
        """Whether a generation asked if its sequences have ended."""
        self.was_drafted = False
        """Whether a generation asked which tokens of a draft are accepted."""
        self._stack = contextlib.ExitStack()
        self._patched: set[tuple[str, str]] = set()
        self._imported = 0
        """How many modules there were at the last look."""

    def __enter__(self) -> StopRule:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def install(self) -> None:
        """Patch what the program has imported since the last call."""
        if self._imported == len(sys.modules):
            return
        self._imported = len(sys.modules)
        not_met, no_padding = functools.partial(self._answer_all, False), functools.partial(self._answer_all, 1)
        for module_name, owner, name, run in (
            (_CRITERIA, "EosTokenCriteria", "__call__", not_met),
            (_CRITERIA, "StopStringCriteria", "__call__", not_met),
            (_CRITERIA, "ConfidenceCriteria", "__call__", _continue_draft),
            (_LOOPS, "GenerationMixin", "_beam_search_has_unfinished_sequences", self._continue_beams),
            (_LOOPS, "GenerationMixin", "_flatten_beam_dim", self._keep_beams_longest),
            (_LOOPS, "GenerationMixin", "_assisted_decoding", self._accept_no_draft),
            (_LOOPS, "GenerationMixin", "_prepare_attention_mask_for_generation", no_padding),
            (_LOOPS, "GenerationMixin", "_get_logits_processor", self._read_tokens),
            (_WHISPER, "WhisperGenerationMixin", "_postprocess_outputs", self._hear_words),
        ):
            holder = getattr(sys.modules.get(module_name), owner, None)
            if holder is not None and name in vars(holder) and (owner, name) not in self._patched:
                self._patched.add((owner, name))
                self._stack.enter_context(torch_common.wrap(holder, name, run))

    def _answer_all(self, value: float, original: _Call, *args: Any, **kwargs: Any) -> Any:
        """What looks at tokens, which has one answer: no sequence meets a criterion, none of a prompt is padding."""
        return self._answer(original(*args, **kwargs), value)

    def _continue_beams(self, original: _Call, unsatisfied: Any, finished: Any, hits: Any, *further: Any) -> Any:
        """Whether beam search goes on: until all have met a criterion that counts tokens."""
        value = known_values.find_value(hits)
        with torch_common.no_modes(), torch_common.pause_observers():  # the program does not ask
            goes_on = value is None or not bool(value.all())
        return self._answer(original(unsatisfied, finished, hits, *further), goes_on)

    def _keep_beams_longest(self, original: _Call, tensor: torch.Tensor) -> Any:
        """The indices of finished beams: all are valid, and their number is the length of the result."""
        flat = original(tensor)
        return self._answer(flat, 0) if flat.dtype is torch.int32 and flat.dim() == 2 else flat

    def _read_tokens(self, original: _Call, *args: Any, encoder_input_ids: Any = None, **kwargs: Any) -> Any:
        """What looks whether a prompt is token ids, or stands for embeddings: ids, which are not negative."""
        asks = encoder_input_ids is not None and not encoder_input_ids.is_floating_point()
        forgets = asks and not known_values.is_known(encoder_input_ids)
        if asks:
            self._answer(encoder_input_ids, 1)
        try:
            return original(*args, encoder_input_ids=encoder_input_ids, **kwargs)
        finally:
            if forgets:
                known_values.forget(encoder_input_ids)

    def _accept_no_draft(self, original: _Call, *args: Any, **kwargs: Any) -> Any:
        """A loop with drafts, in which every drafted token is another than the model's own."""

        def count(cumsum: _Call, tensor: torch.Tensor, *further: Any, **settings: Any) -> Any:
            differs = tensor.dtype is torch.bool and sys._getframe(2).f_code.co_name == original.__name__
            result = cumsum(tensor, *further, **settings)
            if differs and isinstance(result, torch_common.FakeTensor):
                self.was_drafted = True
                return self._answer(result, 1)
            return result

        seek = functools.partial(self._answer_all, False)
        with torch_common.wrap(torch.Tensor, "cumsum", count), torch_common.wrap(torch, "isin", seek):
            return original(*args, **kwargs)

    def _hear_words(self, original: _Call, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        """The tokens that Whisper cuts into segments: each is a word, none is padding or a time."""
        tokens, outputs = original(*args, generation_config=generation_config, **kwargs)
        ends = generation_config.eos_token_id
        other = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
        return self._answer(tokens, next(token for token in range(len(other) + 1) if token not in other)), outputs

    def _answer(self, result: Any, value: float) -> Any:
        if isinstance(result, torch_common.FakeTensor) and not known_values.is_known(result):
            self.was_asked = True
            known_values.fill(result, value)
        return result


def _continue_draft(original: _Call, criterion: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
    """Whether a draft ends, an assistant not being sure of its last token: no, once probabilities are there."""
    if not isinstance(input_ids, torch_common.FakeTensor):
        return original(criterion, input_ids, scores, **kwargs)
    scores[-1].softmax(-1)
    return False
