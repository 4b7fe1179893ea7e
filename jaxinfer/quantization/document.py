"""A report as blocks, and two ways to write it: Markdown beside its pictures, or one HTML file.

Texts are shown as they are, whatever markup they spell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its file beside a Markdown report."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two texts under a question; where the second one leaves the first is shown."""

    question: str
    names: tuple[str, str]
    texts: tuple[str, str]


HTML = ".html"
REPORT_SUFFIXES = (HTML, ".md")
Block = Heading | Paragraph | Table | Picture | SideBySide

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root{{color-scheme:light dark;--line:#d8dee4;--soft:#59636e;--mark:#fff1c2}}
@media(prefers-color-scheme:dark){{:root{{--line:#30363d;--soft:#9198a1;--mark:#5c4708}}
body{{background:#0d1117;color:#f0f6fc}}}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;display:block;overflow-x:auto}}
th,td{{border:1px solid var(--line);padding:.3rem .6rem;text-align:left;vertical-align:top}}
svg{{max-width:100%;height:auto;border:1px solid var(--line);margin:.5rem 0}}
.sides{{display:grid;grid-template-columns:1fr 1fr;gap:1rem;margin:0 0 1.5rem}}
.sides>div{{border:1px solid var(--line);padding:.5rem .8rem;white-space:pre-wrap;
overflow-wrap:anywhere}}
.question{{white-space:pre-wrap;overflow-wrap:anywhere;font-weight:600;margin:0 0 .3rem}}
small{{display:block;color:var(--soft)}}mark{{background:var(--mark);color:inherit}}
</style></head><body>
{body}
</body></html>
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """A page that needs nothing else and runs nothing."""
    return PAGE.format(title=escape(title), body="\n".join(map(_html, blocks)))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Table(head, rows):
            top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
            lines = (
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                for row in rows
            )
            return f"<table><tr>{top}</tr>{''.join(lines)}</table>"
        case Picture(svg=svg):
            return svg
        case SideBySide(question, names, (first, second)):
            same = _num_same(first, second)
            sides = (
                f"<div><small>{escape(name)}</small>{escape(text[:same])}"
                + (f"<mark>{escape(text[same:])}</mark>" if text[same:] else "")
                + "</div>"
                for name, text in zip(names, (first, second), strict=True)
            )
            return f'<p class="question">{escape(question)}</p><div class="sides">' + (
                "".join(sides) + "</div>"
            )


def _num_same(first: str, second: str) -> int:
    """Characters up to where two texts part."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def to_markdown(blocks: Sequence[Block], stem: str) -> tuple[str, dict[str, str]]:
    """Its text, and the pictures by the names of their files, `STEM_NAME.svg`."""
    pictures = {
        f"{stem}_{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)
    }
    return "\n\n".join(_markdown(block, stem) for block in blocks) + "\n", pictures


def markdown_files(name: str, blocks: Sequence[Block]) -> dict[str, str]:
    """What a Markdown report consists of, by file name, the report itself last."""
    text, pictures = to_markdown(blocks, Path(name).stem)
    return {**pictures, name: text}


def write_report(out: Path, title: str, blocks: Sequence[Block]) -> None:
    """As HTML if `out` ends so, else as Markdown with its pictures beside it. Raises: OSError."""
    is_page = out.suffix.lower() == HTML
    files = {out.name: to_html(title, blocks)} if is_page else markdown_files(out.name, blocks)
    for name, content in files.items():
        (out.parent / name).write_text(content, encoding="utf-8")


def _markdown(block: Block, stem: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Table(head, rows):
            lines = [head, ["---"] * len(head), *rows]
            return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        case Picture(name, title, _):
            return f"![{_plain(title)}]({stem}_{name}.svg)"
        case SideBySide(question, names, texts):
            same = _num_same(*texts)
            told = "the same" if texts[0] == texts[1] else f"the same for {same} characters"
            return "\n\n".join([f"**{_plain(question)}** ({told})", *_quoted(names, texts)])


def _quoted(names: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    for name, text in zip_longest(names, texts):
        fence = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", text))]))
        yield f"{_plain(name)}:\n\n{fence}text\n{text}\n{fence}"


def _cell(text: str) -> str:
    return text if text == "---" else _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    escaped = re.sub(r"[\\`*\[\]<>]|(?<!\w)_|_(?!\w)|^#", r"\\\g<0>", text)
    return " ".join(escaped.split())
