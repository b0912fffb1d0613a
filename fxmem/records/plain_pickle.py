"""Reads a pickle that holds plain data, and nothing else: no global is resolved, no object is built, nothing is called.

This is a reader of its own, because Python's unpickler cannot be bounded: one instruction may ask for gigabytes (a
place in the memo), and a key of nested tuples takes exponential time to hash. Here are the instructions that `pickle`
writes for None, bools, ints, floats, strings, lists, tuples and dicts whose keys are strings, in protocols 2 to 5. A
file with any other is refused.

Bounds. Time is linear in the file's length. Memory is, too: no more than one container for each `_BYTES_PER_CONTAINER`
bytes of the file, and `_MARKS` nested ones. `stream` hands the items of lists on as they come and forgets them, so that
its memory is that of what is common to them.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

_BYTES_PER_CONTAINER = 16
"""Of a snapshot as torch writes it, a list or dict takes some 90 bytes of the file."""
_SPARE_CONTAINERS = 1000
_MARKS = 1000
_LONGEST_INT = 16
"""Bytes of an integer. Addresses and sizes take at most nine."""


class PlainPickleError(ValueError):
    """The file is no pickle, or holds more than plain data."""


Content = bytes | mmap.mmap
"""A file, as it is or mapped."""


class References:
    """A list of values that stood in the file before, as the file writes it."""

    __slots__ = ("written",)

    def __init__(self, written: bytes) -> None:
        self.written = written


Rows = list[tuple[Any, ...]]


def stream(
    content: Content, key: str, fields: Sequence[str], take: Callable[[int, Rows], None]
) -> tuple[Any, Callable[[References], list[Any]]]:
    """Return what the pickle holds, but for the dicts in the lists under a key of the outermost dict.

    These lists stay empty. A list in a row may be `References`: equal ones are one object, and the function that is
    returned as well makes the list of one.

    Args:
        content: the pickle.
        key: of the outermost dict; its value is a list of lists of dicts.
        fields: of these dicts.
        take: is given the number of a list and some more rows of it in their order: the fields, None for one that a
            dict does not have.

    Raises:
        PlainPickleError: it is no pickle, is cut short, or holds more than plain data; the lists hold anything else, or
            are referred to. The message is a part of a sentence ("is cut short").
    """
    reader = _Streaming(content, key, fields, take)
    try:
        return reader.run(), reader.resolve
    except (IndexError, struct.error) as error:
        raise PlainPickleError("is no pickle, or only a part of one") from error
    except UnicodeDecodeError as error:
        raise PlainPickleError("holds text that is no UTF-8") from error


class _Reader:
    """The pickle machine: a stack, a memo that is filled in order, and marks on the stack."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.marks: list[int] = []
        self.containers = len(content) // _BYTES_PER_CONTAINER + _SPARE_CONTAINERS

    def run(self) -> Any:
        """Follow the instructions up to the last, and return the one value that is left."""
        content, instructions = self.content, _INSTRUCTIONS
        while True:
            code = content[self.at]
            self.at += 1
            if code == _STOP:
                break
            do = instructions.get(code)
            if do is None:
                raise PlainPickleError(f"holds more than plain data: instruction {code:#04x} at byte {self.at - 1}")
            do(self)
        if self.marks or len(self.stack) != 1:
            raise PlainPickleError("is no pickle of one value")
        return self.stack[0]

    def number(self, size: int) -> int:
        """Read an unsigned number of so many bytes."""
        return int.from_bytes(self.take(size), "little")

    def take(self, size: int) -> bytes:
        """Read so many bytes."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.content):
            raise PlainPickleError("is no pickle, or only a part of one")
        found: bytes = self.content[begin : self.at]
        return found

    def get(self, place: int) -> None:
        """Put a value that is remembered on the stack."""
        self.stack.append(self.memo[place])

    def push_dict(self) -> None:
        """Put an empty dict on the stack."""
        self.push_container({})

    def put(self, place: int) -> None:
        """Remember the value on top. `pickle` numbers places in order."""
        if place == len(self.memo):
            self.memo.append(self.stack[-1])
        elif place < len(self.memo):
            self.memo[place] = self.stack[-1]
        else:
            raise PlainPickleError("numbers its values out of order")

    def mark(self) -> None:
        """Begin a sequence of items."""
        if len(self.marks) >= _MARKS:
            raise PlainPickleError("is nested too deeply")
        self.marks.append(len(self.stack))

    def items(self) -> list[Any]:
        """Take what lies above the last mark off the stack."""
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def push_container(self, made: Any) -> None:
        """Put a list, dict or tuple on the stack, and count it."""
        self.containers -= 1
        if self.containers < 0:
            raise PlainPickleError("holds more lists and dicts than a file of its length has reason to")
        self.stack.append(made)

    def push_tuple(self, size: int) -> None:
        """Make a tuple of the topmost values."""
        if len(self.stack) < size:
            raise PlainPickleError("is no pickle, or only a part of one")
        found = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.push_container(found)

    def push_text(self, size: int) -> None:
        """Put a string of so many bytes on the stack; half of a surrogate pair is refused as no UTF-8."""
        self.stack.append(self.take(size).decode("utf-8"))

    def push_int(self, size: int) -> None:
        """Put a signed integer on the stack."""
        if size > _LONGEST_INT:
            raise PlainPickleError(f"holds an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def append(self, found: list[Any]) -> None:
        """Add values to the list on top."""
        if type(self.stack[-1]) is not list:
            raise PlainPickleError("appends to what is no list")
        self.stack[-1].extend(found)

    def set_items(self, found: list[Any]) -> None:
        """Add keys and values to the dict on top."""
        keys = found[::2]
        if type(self.stack[-1]) is not dict or len(found) % 2:
            raise PlainPickleError("sets an item of what is no dict")
        if any(type(key) is not str for key in keys):
            raise PlainPickleError("holds a dict with a key that is no string")
        self.stack[-1].update(zip(keys, found[1::2], strict=True))

    def pop(self, count: int) -> list[Any]:
        """Take so many values off the stack, in the order they were put there."""
        if len(self.stack) < count + 1:
            raise PlainPickleError("is no pickle, or only a part of one")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found


_GONE = object()
_GET = rb"h.|j.{4}"
_LIST = rb"\]\x94(?:\((?:h.|j.{4})+e|(?:h.|j.{4})a)?"
"""An empty list, or one that has nothing but values of before."""
_PLAIN = rb"h.|j.{4}|K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})|N"
_VALUE = _PLAIN + rb"|" + _LIST
_DICT = re.compile(rb"\x94\(((?:(?:" + _GET + rb")(?:" + _VALUE + rb"))+)u", re.DOTALL)
"""What follows the instruction for an empty dict whose keys stood before."""
_PAIR = re.compile(rb"(" + _GET + rb")(?:" + _VALUE + rb")", re.DOTALL)
_REFERENCE = re.compile(rb"h(.)|j(.{4})", re.DOTALL)
_MOST_ROWS = 1000
_MOST_FORMS = 16


class _Form:
    """The dicts with one sequence of keys, as they are written."""

    def __init__(self, keys: Sequence[bytes], names: Sequence[str], fields: Sequence[str]) -> None:
        taken = [name for name in names if name in fields]
        value = {True: rb"(" + _VALUE + rb")", False: rb"(?:" + _PLAIN + rb")"}
        pairs = (re.escape(key) + value[name in fields] for key, name in zip(keys, names, strict=True))
        self.pattern = re.compile(rb"\}\x94\(" + b"".join(pairs) + rb"u", re.DOTALL)
        self.places = [taken.index(field) if field in taken else None for field in fields]
        """Of each field, its place among the values that the pattern finds."""


class _Streaming(_Reader):
    """Hands on the dicts of some lists. Those that a dump of torch has millions of are matched as a whole."""

    def __init__(self, content: Content, key: str, fields: Sequence[str], take: Callable[[int, Rows], None]) -> None:
        super().__init__(content)
        self.key, self.fields, self.taker = key, fields, take
        self.known: dict[bytes, References] = {}
        self.forms: list[_Form] = []
        self.fresh = 0
        """Where in the memo the values begin that may be dicts not handed on yet."""

    def get(self, place: int) -> None:
        self.stack.append(self.recall(place))

    def recall(self, place: int) -> Any:
        """Return a value that is remembered."""
        found = self.memo[place]
        if found is _GONE:
            raise PlainPickleError("refers to an entry of its history")
        return found

    def append(self, found: list[Any]) -> None:
        at = self.find_list()
        if at is None:
            super().append(found)
        else:
            self.hand_on(at, found)

    def push_dict(self) -> None:
        at = self.find_list(above=1) if self.marks else None
        if at is None or not self.match_dicts(at):
            super().push_dict()

    def hand_on(self, at: int, found: list[Any]) -> None:
        """Hand on dicts that were made, and forget them."""
        if any(type(each) is not dict for each in found):
            raise PlainPickleError("holds a history of something else than events")
        self.taker(at, [tuple(map(each.get, self.fields)) for each in found])
        ids = {id(each) for each in found}
        for place in range(self.fresh, len(self.memo)):
            if id(self.memo[place]) in ids:
                self.memo[place] = _GONE
        self.fresh = len(self.memo)

    def find_list(self, above: int = 0) -> int | None:
        """The number of the list on top, if its items are handed on; or of the one whose items are on top."""
        if self.key not in self.stack:
            return None
        outer = self.stack.index(self.key) + 1
        top = (self.marks[-1] if above else len(self.stack)) - 1
        inside = self.marks[:-1] if above else self.marks
        begun = inside[-1] if inside else 0  # where the lists begin, or what else is being made
        if begun > outer + 1 or not (top == outer + 1 or (begun == outer + 1 and top > outer)):
            return None
        if type(self.stack[outer]) is not list:
            return None
        return len(self.stack[outer]) + top - outer - 1

    def match_dicts(self, at: int) -> bool:
        """Hand on the dicts that follow, as far as they are written in the known way; False if the first is not."""
        self.at -= 1
        form = next((each for each in self.forms if each.pattern.match(self.content, self.at)), None)
        form = form or self.learn_form()
        if form is None:
            self.at += 1
            return False
        match, places, rows, content = form.pattern.match, form.places, [], self.content
        if match(content, self.at) is None:
            self.at += 1
            return False
        if waiting := self.stack[self.marks[-1] :]:
            del self.stack[self.marks[-1] :]
            self.hand_on(at, waiting)
        while (found := match(content, self.at)) is not None:
            self.at = found.end()
            self.memo.append(_GONE)
            self.containers -= 1
            values = [self.decode(value) for value in found.groups()]
            rows.append(tuple([None if place is None else values[place] for place in places]))
            if len(rows) == _MOST_ROWS:
                self.check_containers()
                self.taker(at, rows)
                rows = []
        self.check_containers()
        self.taker(at, rows)
        self.fresh = len(self.memo)
        return True

    def learn_form(self) -> _Form | None:
        """How the dict is written that stands here; None if it is not made of values that stood before and numbers."""
        found = _DICT.match(self.content, self.at + 1)
        if found is None or len(self.forms) == _MOST_FORMS:
            return None
        keys = [each[1] for each in _PAIR.finditer(found[1])]
        names = [self.recall(int.from_bytes(each[1:], "little")) for each in keys]
        if any(type(name) is not str for name in names) or len(set(names)) < len(names):
            return None
        self.forms.append(_Form(keys, names, self.fields))
        return self.forms[-1]

    def know(self, written: bytes) -> References:
        """One object for all lists that are written so, each of which is remembered."""
        found = self.known.get(written)
        if found is None:
            found = self.known[written] = References(written)
        self.memo.append(found)
        self.containers -= 1
        return found

    def check_containers(self) -> None:
        """Refuse a file that holds more of them than it has reason to."""
        if self.containers < 0:
            raise PlainPickleError("holds more lists and dicts than a file of its length has reason to")

    def decode(self, value: bytes) -> Any:
        """Return the value that is written so."""
        code = value[0]
        if code == _LONG:
            return int.from_bytes(value[2:], "little", signed=True)
        if code == _OPEN:
            return self.know(value)
        if code in b"hj":
            return self.recall(int.from_bytes(value[1:], "little"))
        return None if code == _NONE else int.from_bytes(value[1:], "little", signed=code == _INT)

    def resolve(self, references: References) -> list[Any]:
        """Return the list that is written so."""
        places = (int.from_bytes(each[1] or each[2], "little") for each in _REFERENCE.finditer(references.written[2:]))
        return [self.recall(place) for place in places]


_OPEN, _LONG, _NONE, _INT = ord("]"), 0x8A, ord("N"), ord("J")
_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Reader], object]] = {
    0x80: lambda reader: reader.take(1),  # PROTO
    0x95: lambda reader: reader.take(8),  # FRAME
    ord("N"): lambda reader: reader.stack.append(None),
    0x88: lambda reader: reader.stack.append(True),
    0x89: lambda reader: reader.stack.append(False),
    ord("K"): lambda reader: reader.stack.append(reader.number(1)),
    ord("M"): lambda reader: reader.stack.append(reader.number(2)),
    ord("J"): lambda reader: reader.push_int(4),
    0x8A: lambda reader: reader.push_int(reader.number(1)),
    ord("G"): lambda reader: reader.stack.append(struct.unpack(">d", reader.take(8))[0]),
    0x8C: lambda reader: reader.push_text(reader.number(1)),
    ord("X"): lambda reader: reader.push_text(reader.number(4)),
    0x8D: lambda reader: reader.push_text(reader.number(8)),
    ord("]"): lambda reader: reader.push_container([]),
    ord("}"): lambda reader: reader.push_dict(),
    ord(")"): lambda reader: reader.push_container(()),
    0x85: lambda reader: reader.push_tuple(1),
    0x86: lambda reader: reader.push_tuple(2),
    0x87: lambda reader: reader.push_tuple(3),
    ord("("): lambda reader: reader.mark(),
    ord("t"): lambda reader: reader.push_container(tuple(reader.items())),
    ord("l"): lambda reader: reader.push_container(reader.items()),
    ord("a"): lambda reader: reader.append(reader.pop(1)),
    ord("e"): lambda reader: reader.append(reader.items()),
    ord("s"): lambda reader: reader.set_items(reader.pop(2)),
    ord("u"): lambda reader: reader.set_items(reader.items()),
    0x94: lambda reader: reader.put(len(reader.memo)),  # MEMOIZE
    ord("q"): lambda reader: reader.put(reader.number(1)),
    ord("r"): lambda reader: reader.put(reader.number(4)),
    ord("h"): lambda reader: reader.get(reader.number(1)),
    ord("j"): lambda reader: reader.get(reader.number(4)),
}
"""By their codes in `pickletools`."""
