"""Reads a pickle that holds plain data, and nothing else: no global is resolved, no object is built, nothing is called.

This is a reader of its own, because Python's unpickler cannot be bounded: one instruction may ask for gigabytes (a
place in the memo), and a key of nested tuples takes exponential time to hash. Here are the instructions that `pickle`
writes for None, bools, ints, floats, strings, lists, tuples and dicts whose keys are strings, in protocols 2 to 5. A
file with any other is refused.

Bounds. Time is linear in the file's length. Memory is, too: no more than one container for each `_BYTES_PER_CONTAINER`
bytes of the file, and `_MARKS` nested ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_BYTES_PER_CONTAINER = 16
"""Of a snapshot as torch writes it, a list or dict takes some 90 bytes of the file."""
_SPARE_CONTAINERS = 1000
_MARKS = 1000
_LONGEST_INT = 16
"""Bytes of an integer. Addresses and sizes take at most nine."""


class PlainPickleError(ValueError):
    """The file is no pickle, or holds more than plain data."""


def load(content: bytes) -> Any:
    """Return what the pickle holds.

    Raises:
        PlainPickleError: it is no pickle, is cut short, or holds more than plain data; the message is a part of a
            sentence ("is cut short").
    """
    reader = _Reader(content)
    try:
        return reader.run()
    except (IndexError, struct.error) as error:
        raise PlainPickleError("is no pickle, or only a part of one") from error
    except UnicodeDecodeError as error:
        raise PlainPickleError("holds text that is no UTF-8") from error


class _Reader:
    """The pickle machine: a stack, a memo that is filled in order, and marks on the stack."""

    def __init__(self, content: bytes) -> None:
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
        return self.content[begin : self.at]

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
    ord("}"): lambda reader: reader.push_container({}),
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
    ord("h"): lambda reader: reader.stack.append(reader.memo[reader.number(1)]),
    ord("j"): lambda reader: reader.stack.append(reader.memo[reader.number(4)]),
}
"""By their codes in `pickletools`."""
