"""Anything that may stand on a command line or in a file: a value or one clear line, and never anything else.

`PARSERS` is what `tests/fuzzing/parsers.py` (`make -C benchmarks fuzz-parsers`) gives many more texts to. `FOUND` are
texts that once went wrong.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.parsers import PARSERS, SEEDS, fed

FOUND: list[tuple[str, str]] = [
    ("budget", "9" * 400),
    ("budget", "9" * 400 + "TiB"),
    ("budget", "1" + "0" * 308 + "TB"),
    ("budget", "\u0661GiB"),
    ("tolerance", "9" * 400 + "%"),
    ("setting", "a=" + "[" * 10**5),
    ("setting", "a=" + "-" * 10**5 + "1"),
    ("setting", "a=" + "9" * 5000),
    ("setting", "a=1" + "+1" * 10**5),
    ("setting", "a=\0"),
    ("input", "1" * 18 + "x" + "1" * 18),
    ("input", "x".join(["1"] * 10**4)),
    ("input", "2x3:__class__"),
    ("input", "a\0b.py:make"),
    ("model", "hf:" + "a" * 300 + "/config.json"),
    ("model", "hf:\0.json"),
    ("model", "a\0b.py:make"),
    ("model", "n" * 5000 + ".py:make"),
    ("model", "a." * 5000 + "b:make"),
    ("model", "~nobody_of_that_name/m.py:make"),
    ("target", "\ud800"),
    ("target", "a" * 10**5),
    ("target", "\0.json"),
    ("target", "n" * 5000 + ".json"),
]


@pytest.mark.parametrize(("name", "text"), FOUND, ids=range(len(FOUND)))
def test_what_once_went_wrong(name: str, text: str) -> None:
    fed(name, text)


texts = st.one_of(st.text(), st.text("0123456789xX,.:=%_-+[](){}'\"\\/ abefhkmtpyGMKTiB\0\x1b", max_size=40))


@pytest.mark.parametrize("name", PARSERS)
def test_any_text_is_a_value_or_refused_in_one_line(name: str) -> None:
    @given(
        st.one_of(
            texts,
            st.builds(
                lambda seed, cut, put: seed[:cut] + put + seed[cut:],
                st.sampled_from(SEEDS[name]),
                st.integers(0, 40),
                texts,
            ),
        )
    )
    def check(text: str) -> None:
        fed(name, text)

    check()
