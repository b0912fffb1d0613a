"""What SVG is written with: text that cannot end an element, text that fits, and colours that stand in one place."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from fxmem.show.svg import DARK, LIGHT, css_variables, element, fit, group, path, style_sheet, text, text_width, wrap
from tests import ROOT

# --- elements ---------------------------------------------------------------------------------------------------------


def test_attributes_are_left_out_escaped_or_rounded() -> None:
    assert element("g", id=None, class_="", data_left=3.04, rx=2) == '<g data-left="3" rx="2"/>'
    assert element("g", "<a/>", data_name='"<&\x00') == '<g data-name="&quot;&lt;&amp;\\x00"><a/></g>'


def test_a_path_has_spaces_between_numbers_alone() -> None:
    assert path("axis", "M", 1, 2.55, "C", 1, 2, 3, 4, "H", 5) == '<path class="axis" d="M1 2.5C1 2 3 4H5"/>'


def test_a_tooltip_keeps_its_lines_and_no_text_ends_an_element() -> None:
    drawn = group(text(0, 0, "</text>"), tooltip=["</title>", "a\nb"])
    root = ET.fromstring(drawn)
    assert root.findtext("title") == "</title>\na\\nb"
    assert root.findtext("text") == "</text>"


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_is_cut_to_fit() -> None:
    assert fit("abc", 10, 100) == "abc"
    for words in ("a" * 50, "日本語" * 20, "mmm iii " * 9):
        cut = fit(words, 12, 80, bold=True)
        assert cut.endswith("…")
        assert words.startswith(cut[:-1])
        assert text_width(cut, 12, bold=True) <= 80


def test_text_is_broken_at_spaces() -> None:
    assert wrap("one two three", 10, 50, lines=3) == ["one two", "three"]
    lines = wrap("word " * 50, 10, 60, lines=2)
    assert len(lines) == 2
    assert lines[1].endswith("…")
    assert all(text_width(line, 10) <= 60 for line in lines)


# --- colours ----------------------------------------------------------------------------------------------------------


def test_every_rule_is_bound_to_its_document(tmp_path: Path) -> None:
    template = tmp_path / "m.css"
    template.write_text("a,b{x:y}\n/* colours */\n.page{fill:$page}\n", encoding="utf-8")
    style = style_sheet(template)
    light, dark = f".fxmem-m .page{{fill:{LIGHT.page}}}", f".fxmem-m .page{{fill:{DARK.page}}}"
    light = f"svg.fxmem-m{{background:{LIGHT.page}}}.fxmem-m a,.fxmem-m b{{x:y}}{light}"
    dark = f"svg.fxmem-m{{background:{DARK.page}}}{dark}"
    assert style.css == f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def test_a_colour_stands_once_and_in_the_palette() -> None:
    color = re.compile(r"#(?:[0-9a-fA-F]{3}){1,2}\b(?=[\"';,)} ])")
    found = {
        file.name: color.findall(file.read_text(encoding="utf-8"))
        for file in (ROOT / "fxmem" / "show").rglob("*")
        if file.suffix in (".py", ".css", ".js", ".jinja")
    }
    assert [name for name, colors in found.items() if colors] == ["svg.py"]
    assert [each for each, times in Counter(found["svg.py"]).items() if times > 1] == []


def test_a_page_has_a_variable_for_every_colour() -> None:
    css = (ROOT / "fxmem" / "show" / "html" / "page.css").read_text(encoding="utf-8")
    used = set(re.findall(r"var\(--([a-z]+)\)", css)) - {"share"}
    light, dark = css_variables().split("@media")
    assert all(f"--{name}:" in light and f"--{name}:" in dark for name in used)
    assert f"--limit:{LIGHT.limit};" in light
    assert f"--limit:{DARK.limit};" in dark
