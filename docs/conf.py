"""Configuration of the documentation site: Sphinx, MyST Markdown, Furo."""

import re
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]

project = "modkit"
copyright = "the modkit authors"  # noqa: A001 - the name that Sphinx reads

# The directives of ``doctest`` are in docstrings of torch; nothing runs them.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "modkit"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The trainers that modkit has callbacks for are not needed to describe them.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True

# Signatures and bases refer to torch and to the standard library. Their inventories would have to
# be downloaded for every build, so these references stay plain text.
# Type variables have no page either.
nitpick_ignore_regex = [("py:.*", r"(?!modkit\.).*"), ("py:.*", r"modkit\..*T")]


def adapt_text_of_torch(*arguments: Any) -> None:
    """Adapt docstrings of torch to these pages, and emphasize what modkit adds to them.

    References to torch's own pages become plain text.
    """
    text = "\n".join(arguments[-1])
    text = re.sub(r":ref:`([\w-]+?)(-doc)?`", r"page ``\1`` of torch's documentation", text)
    # In Markdown pages, names of links are not found: each link gets its address.
    for name, address in re.findall(r"^\.\. _([^:]+):\s+(\S+)$", text, flags=re.MULTILINE):
        words = r"\s+".join(map(re.escape, name.split()))
        text = re.sub(f"`({words})`_", rf"`\1 <{address}>`__", text)
    # Without blank lines around it, the directive is text, and the code that follows its argument.
    text = re.sub(r"^( *\.\. testcode::)$", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"^modkit: ", "**modkit:** ", text, flags=re.MULTILINE)
    arguments[-1][:] = text.split("\n")


def link_to_pages(app: Any, path: Any, page: str, content: list[str]) -> None:
    """Turn links of an included page, which are right in a checkout, into links between pages.

    The README is included in ``index``, and ``CHANGELOG.md`` in ``changelog``.
    """
    pages = {f"{name}.md" for name in app.env.found_docs}

    def link(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/")
        name = target.partition("#")[0]
        if not (ROOT / match[1].partition("#")[0]).is_file():
            return match[0]
        page = next((one for one in (name, name.lower()) if one in pages), f"../{name}")
        return f"]({page}{target.removeprefix(name)})"

    content[0] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", link, content[0])


def setup(app: Any) -> None:
    """Enter the functions above in Sphinx."""
    app.connect("autodoc-process-docstring", adapt_text_of_torch)
    app.connect("include-read", link_to_pages)
