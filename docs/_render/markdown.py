"""Markdown: tables, filled paragraphs, and the blocks of a page between two marks."""

import re
import textwrap
from collections.abc import Iterable, Sequence


MARKS = "<!-- {name}: written by docs/render.py -->", "<!-- end of {name} -->"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = False) -> str:
    """Return a Markdown table; with ``numbers``, all columns but the first are right-aligned."""
    rule = ["---", *["---:" if numbers else "---"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (headings, rule, *rows))


def wrapped(page: str) -> str:
    """Return a page with its paragraphs and list items filled to 120 columns."""
    parts = []
    for block in page.split("\n\n"):
        if block.startswith(("|", "<", "#", "`" * 3)):
            parts.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        parts.append("\n".join(fill(item, "  " if item.startswith("- ") else "") for item in items))
    return "\n\n".join(parts)


def fill(text: str, indent: str = "") -> str:
    """Return a paragraph filled to 120 columns, with each span of code on one line."""
    # A character that no page has takes the place of spaces in code.
    protected = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    filled = textwrap.fill(
        protected,
        120,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\0", " ")


def replace(text: str, blocks: dict[str, str]) -> str:
    """Return the text with the content of each named block replaced.

    Raises:
        ValueError: If the marks of a block are missing or not unique.
    """
    for name, content in blocks.items():
        start, end = (mark.format(name=name) for mark in MARKS)
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"expected the marks of {name!r} once")
        block = f"{start}\n\n{content}\n\n{end}".replace("\\", r"\\")
        text = pattern.sub(block, text)
    return text
