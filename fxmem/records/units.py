"""Quantities and untrusted names, written for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-number // multiple) * multiple


def sum_known(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is unknown."""
    found = list(numbers)
    return None if None in found else sum(each or 0 for each in found)


def format_bytes(n: int | None) -> str:
    """Bytes in the unit in which they stay below 1000, at most nine characters: `768 B`, `9.77 MiB`, `97.7 GiB`.

    None is `unknown`.
    """
    if n is None:
        return "unknown"
    if abs(n) < 1024:
        return f"{n} B"
    value, unit = _scale(n, 1024, ("KiB", "MiB", "GiB", "TiB"))
    return f"{value:.{2 if abs(value) < 9.995 else 1}f} {unit}"


def short_bytes(n: int) -> str:
    """As `format_bytes`, for a table full of it: no bytes are `0`."""
    return format_bytes(n) if n else "0"


def format_flops(n: int | None) -> str:
    """Floating-point operations in powers of 1000: `512`, `1.2 K`, `3.0 G`. One multiply-add is 2. None is
    `unknown`."""
    if n is None:
        return "unknown"
    if abs(n) < 1000:
        return str(n)
    value, unit = _scale(n, 1000, ("K", "M", "G", "T", "P", "E"))
    return f"{value:.1f} {unit}"


def exact_bytes(n: int) -> str:
    """The rounded figure and the exact one: `9.77 MiB (10,240,000 bytes)`."""
    return f"{format_bytes(n)} ({n:,} bytes)"


def percent(part: int, whole: int) -> str:
    """A share with one decimal; what would round to zero or to all but is not is `<0.1 %` or `>100.0 %`."""
    share = 100 * part / whole if whole else 0.0
    if 100 < share < 100.05:
        return ">100.0 %"
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def format_seconds(middle: float, *interval: float) -> str:
    """A time, and the interval that it lies in: `41.2 ms (35.1 to 48)`."""
    factor, unit = next((each for each in ((1.0, "s"), (1e3, "ms")) if middle * each[0] >= 1), (1e6, "us"))
    shown, *ends = (f"{float(f'{seconds * factor:.3g}'):g}" for seconds in (middle, *interval))
    return f"{shown} {unit}" + (f" ({' to '.join(ends)})" if ends else "")


def format_shape(shape: Sequence[int]) -> str:
    """`32x3x224x224`, the form the command line reads; `scalar` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def to_words(name: str) -> str:
    """A name of a kind or a figure as words: `optimizer_state` is `optimizer state`."""
    return name.replace("_", " ")


def package_path(file: str) -> str:
    """The path of an installed package's file from the package on; any other path as it is."""
    return re.split(r"(?:site|dist)-packages[/\\]", file)[-1]


def printable(text: str) -> str:
    """The text with every control character spelled out as in a Python literal. A terminal shows it instead of obeying
    it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def spreadsheet_text(text: str) -> str:
    """Printable text that no spreadsheet runs as a formula: an apostrophe stands in front of one.

    As OWASP advises (https://owasp.org/www-community/attacks/CSV_Injection); some spreadsheets also read the full-width
    signs.
    """
    shown = printable(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _scale(n: int, base: int, units: Sequence[str]) -> tuple[float, str]:
    value = float(n)
    for unit in units:
        value /= base
        # One decimal of 999.95 is 1000.0, a character too many.
        if abs(value) < 999.95:
            return value, unit
    return value, units[-1]
