"""Configuration of the documentation site: Sphinx, MyST Markdown, Furo."""

import ast
import functools
import importlib
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import modkit


# Without stubs for type checkers.
nodes: Any = importlib.import_module("docutils.nodes")

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

project = "modkit"
version = release = modkit.__version__
copyright = "the modkit authors"  # noqa: A001 - the name that Sphinx reads

# The directives of ``doctest`` are in docstrings of torch; nothing runs them.
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# Pages for contributors are read in the repository.
exclude_patterns = ["_build", "_render", "test_evidence.md", "benchmark_budgets.md"]
html_theme = "furo"
html_title = f"modkit {release}"
html_static_path = ["_static"]
html_favicon = "_static/logo.svg"
html_theme_options = {"light_logo": "logo.svg", "dark_logo": "logo-dark.svg"}
html_css_files = ["pages.css"]
html_js_files = ["tables.js"]
# The button copies what a shell or Python reads, without prompts and without their output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The trainers that modkit has callbacks for are not needed to describe them.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# One parameter a line, where a signature is longer than a line.
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_use_ivar = True
# The tables of names get their text from docstrings; each name has its entry on another page.
autosummary_generate = False

# Signatures and bases refer to torch and to the standard library. Their inventories would have to
# be downloaded for every build, so these references stay plain text.
# Type variables, and types in private modules, have no page either.
nitpick_ignore_regex = [
    ("py:.*", r"(?!modkit\.).*"),
    ("py:.*", r"modkit\..*T(_co)?"),
    ("py:class", r"modkit\.(averaging|migrations\.steps|_fast_inference)\..*"),
]


# The type variables of models and classes, a class of torch, and the keywords of EMA, which other
# classes pass on.
SHOWN_TYPES = {
    r"(modkit\.(\w+\.)*)?(ModelT_co|ModelT|ModuleT|T)": "Module",
    r"(modkit\.(\w+\.)*)?_ClassT": "type",
    r"(torch\.(\w+\.)*)?_IncompatibleKeys": "NamedTuple",
    r"(modkit\.(\w+\.)*)?_Block": "AbstractContextManager",
}
KEYWORDS = re.compile(r": ~?(?:[\w.]+\.)?Unpack\[[^]]*\]")


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
    text = re.sub(
        r"(?<![<`])https://(arxiv)\.org/abs/([\d.]+\d)",
        r"`arXiv:\2 <https://\1.org/abs/\2>`__",
        text,
    )
    text = re.sub(r"^modkit: ", "**modkit:** ", text, flags=re.MULTILINE)
    arguments[-1][:] = text.split("\n")


def hide_keywords(
    app: Any, what: str, name: str, owner: Any, options: Any, signature: str | None, result: str
) -> tuple[str | None, str]:
    """Leave the private type of keywords that are passed on out of a signature."""
    return signature and KEYWORDS.sub("", signature), result


def show_types(app: Any, doctree: Any) -> None:
    """Write private types as the classes that users know, such as the model of a generic class."""
    for node in [*doctree.findall(nodes.Text)]:
        for pattern, shown in SHOWN_TYPES.items():
            if re.fullmatch(pattern, node):
                node.parent.replace(node, nodes.Text(shown))


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
        # A file that is not a page, such as a picture, is found from this folder.
        elsewhere = name if match[1].startswith("docs/") else f"../{name}"
        page = next((one for one in (name, name.lower()) if one in pages), elsewhere)
        return f"]({page}{target.removeprefix(name)})"

    content[0] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", link, content[0])
    unlink_files(app, "index", content)


def unlink_files(app: Any, page: str, content: list[str]) -> None:
    """Turn links to Markdown files of the repository without a page into their text."""

    def text(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        return match[0] if file in app.env.found_docs else match[1]

    content[0] = re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]+)\.md(?:#[^)]*)?\)", text, content[0])


@functools.cache
def classes() -> dict[str, list[str]]:
    """Return the modules of modkit by the names of the classes that they define."""
    found: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_at(path))
    return found


def module_at(path: Path) -> str:
    """Return the name of a module of modkit."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def source_of(app: Any, module: str, name: str) -> str | None:
    """Return the module that defines an object, for its link; ``__module__`` is its public path."""
    owner: Any = None
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        owner, found = found, getattr(found, part, None)

    function: Any = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else None
    code = getattr(function, "__code__", None)
    if code is not None and Path(code.co_filename).is_relative_to(SOURCE):
        return module_at(Path(code.co_filename))

    # A property is looked up in its class.
    wanted = found if isinstance(found, type) else owner
    title = getattr(wanted, "__name__", "")
    for place in classes().get(title, ()):
        if getattr(importlib.import_module(place), title) is wanted:
            return place
    return None


def add_methods(app: Any, module: str) -> tuple[str, dict[str, Any]] | None:
    """Return source and places of a mechanism of Module, whose functions are methods of Module."""
    if not module.startswith("modkit.nn._"):
        return None
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    methods = {f"Module.{name}": place for name, place in analyzer.tags.items()}
    return analyzer.code, {**analyzer.tags, **methods}


def setup(app: Any) -> None:
    """Enter the functions above in Sphinx."""
    app.connect("autodoc-process-docstring", adapt_text_of_torch)
    app.connect("autodoc-process-signature", hide_keywords)
    app.connect("include-read", link_to_pages)
    app.connect("source-read", unlink_files)
    app.connect("doctree-read", show_types)
    app.connect("viewcode-follow-imported", source_of)
    app.connect("viewcode-find-source", add_methods)
