"""Both forms show every text as it is, and need nothing from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from jaxinfer.quantization.document import (
    Heading,
    Paragraph,
    Picture,
    SideBySide,
    Table,
    to_html,
    to_markdown,
    write_report,
)

EVIL = "<script>alert(1)</script> | `x` **b** ```\n[l](u)"
SVG = '<svg xmlns="http://www.w3.org/2000/svg"></svg>'
BLOCKS = [
    Heading("Cost"),
    Paragraph("layers.3.mlp.down_proj is *worst*"),
    Table(["what", "a|b"], [["KL", "0.1"], [EVIL, "x"]]),
    Picture("kl", "KL per token", SVG),
    SideBySide("Why?", ("a", "b"), ("Because so.", "Because not.")),
    SideBySide(EVIL, ("a", "b"), (EVIL, EVIL)),
]


class Page(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_shows_texts_and_runs_none():
    html = to_html("a <title>", BLOCKS)
    page = Page(html)
    assert "script" not in page.tags
    assert page.text.count(EVIL) == 4  # table, question, both answers
    assert page.tags.count("svg") == 1
    assert "src=" not in html
    assert "href=" not in html


def test_html_marks_where_answers_part():
    assert "Because <mark>so.</mark>" in to_html("t", BLOCKS)
    assert "Because <mark>not.</mark>" in to_html("t", BLOCKS)
    assert Page(to_html("t", BLOCKS)).tags.count("mark") == 2  # none where they are equal


def test_markdown_links_its_pictures_by_file():
    text, pictures = to_markdown(BLOCKS, "report")
    assert "![KL per token](report_kl.svg)" in text
    assert pictures == {"report_kl.svg": SVG}


def test_markdown_texts_are_escaped_and_words_with_underscores_are_not():
    text, _ = to_markdown(BLOCKS, "report")
    assert r"layers.3.mlp.down_proj is \*worst\*" in text
    assert "| KL | 0.1 |" in text
    row = next(line for line in text.splitlines() if "script" in line and line.startswith("|"))
    assert row.replace("\\|", "").count("|") == 3
    assert "\\<script\\>" in row


def test_a_fence_is_longer_than_any_inside():
    text, _ = to_markdown([SideBySide("q", ("a", "b"), ("````\nx", "y"))], "r")
    assert "`````text\n````\nx\n`````" in text
    assert "```text\ny\n```" in text


def test_markdown_tells_where_answers_part():
    text, _ = to_markdown(BLOCKS, "r")
    assert "**Why?** (the same for 8 characters)" in text
    assert "(the same)" in text


def test_the_name_s_ending_chooses_the_form(tmp_path: Path):
    write_report(tmp_path / "a.html", "t", BLOCKS)
    write_report(tmp_path / "b.md", "t", BLOCKS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.md", "b_kl.svg"]
    assert (tmp_path / "a.html").read_text("utf-8").startswith("<!doctype html>")
