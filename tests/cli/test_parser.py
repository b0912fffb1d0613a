"""Arguments as data, and what a parser makes of them. Its messages are in `test_cli.py`."""

from __future__ import annotations

import pytest

from fxmem.cli.parser import Argument, Parser, argument, flag, repeatable

SIZE = argument("--size", type=int, default=8, metavar="N", help="how many")
NAME = argument("name", help="what it is called")
LOUD = flag("--loud", help="more of it")
EACH = repeatable("--each", metavar="X", help="one of several")


def parser(*arguments: Argument) -> Parser:
    return Parser(prog="tool").add_arguments(arguments)


def test_values_and_defaults() -> None:
    given = parser(SIZE, LOUD, EACH, NAME).parse_args(["it", "--size", "3", "--loud", "--each", "a", "--each", "b"])
    assert (given.name, given.size, given.loud, given.each) == ("it", 3, True, ["a", "b"])
    left_out = parser(SIZE, LOUD, EACH, NAME).parse_args(["it"])
    assert (left_out.size, left_out.loud, left_out.each) == (8, False, [])


def test_the_help_names_the_default_and_no_default_that_is_none() -> None:
    text = parser(SIZE, NAME, LOUD, EACH).format_help()
    assert "how many (default 8)\n" in text
    assert text.count("default") == 1


def test_declared_once_and_used_twice_an_argument_keeps_no_values() -> None:
    assert parser(EACH).parse_args(["--each", "a"]).each == ["a"]
    assert parser(EACH).parse_args([]).each == []


def test_arguments_are_listed_in_order_without_help() -> None:
    assert [action.dest for action in parser(SIZE, NAME, LOUD).arguments()] == ["size", "name", "loud"]


def test_what_is_declared_stays() -> None:
    with pytest.raises(AttributeError):
        SIZE.names = ("--other",)  # type: ignore[misc]
