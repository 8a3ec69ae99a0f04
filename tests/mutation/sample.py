"""Run a random sample of the mutants that mutmut makes of a room, against the tests of that room.

python -m tests.mutation.sample --count 150 --seed 17 --part files

Mutmut's own runner does not fit: it leaves decorated functions out, as most of those of a module are, and calls all
others through a wrapper, where modkit compares functions by identity and warnings name a frame of the caller. Here the
tests run once, and record which functions each of them calls. A mutant is the code of a function, replaced in a forked
process, which runs the tests that call the function until one fails, the fastest first.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import json
import math
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import libcst as cst
import pytest
from coverage import Coverage
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import get_ignored_lines

from tests.mutation.run import ROOT


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from coverage import CoverageData

SOURCE = ROOT / "src" / "modkit"
# The source of each part, and the tests that are run for its mutants.
PARTS = {
    "nn": (
        "nn _tree.py",
        (
            "parity/module parity/hooks parity/fixes unit/test_surface.py "
            "unit/test_load_state_dict.py unit/load"
        ),
    ),
    "averaging": (
        "averaging optim",
        "unit/averaging unit/migrations/test_averages.py parity/averaging parity/fixes",
    ),
    "files": ("files", "unit/files unit/cli/test_convert.py unit/cli/test_inspect.py"),
    "jit": ("jit", "parity/jit unit/jit integration/torch_jit"),
    "fast_inference": ("_fast_inference", "parity/fast_inference integration/fast_inference"),
    "migrations": (
        "migrations _renames.py _mismatches.py nn/_load_matching.py",
        "unit/migrations unit/load unit/cli/test_migrate.py unit/cli/test_diff.py property/test_migrations.py",
    ),
}
# A forked process cannot use the threads of the one before, so tests of torch.compile are left out,
# and so are those of faults, in processes of their own, which do not have the mutant.
LEFT_OUT = "not inductor and not test_write_faults"
# Tests of torch.compile have this word in their names; in the part jit it means TorchScript.
LEFT_OUT_BUT_IN_JIT = "not compile"
# Seconds: of a test that is run, which may have many cases, and without a test that ends.
SLOW, LIMIT = 15.0, 60.0


class _Visitor(MutationVisitor):  # type: ignore[misc, unused-ignore]
    """Finds mutations in decorated functions too, since the code itself is replaced."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return any("overload" in cst.Module([]).code_for_node(one) for one in node.decorators)
        return bool(super()._skip_node_and_children(node))


def mutants_of(file: Path) -> list[Callable[[], str]]:
    """Return functions that return the source of each mutant of a file."""
    source = file.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(mutation_operators, get_ignored_lines(str(file), source, wrapper, None))
    module = wrapper.visit(visitor)
    mutations = [m for m in visitor.mutations if m.contained_by_top_level_function is not None]
    return [
        functools.partial(_replaced, module, m.original_node, m.mutated_node) for m in mutations
    ]


def _replaced(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> str:
    code: str = cast("Any", module.deep_replace(old, new)).code
    return code


def difference(before: str, after: str) -> str:
    """Return the first line that differs, before and after."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    number, (old, new) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
    return f"{number}: {old.strip()} -> {new.strip()}"


class _Observable(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        node.msg = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        if name == "zip":
            node.keywords = []
        return node.args[1] if name == "cast" and len(node.args) == 2 else node


def observable(source: str) -> str:
    """Return a file without what tests do not see: texts of assertions, `strict` and types of casts."""
    return ast.dump(_Observable().visit(ast.parse(source)))


def changed_lines(before: str, after: str) -> set[int]:
    """Return the lines of the statements of a file that a mutant changes."""
    old, new = before.splitlines(), after.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b)
    ends = zip(reversed(old), reversed(new), strict=False)
    last = len(old) - next(i for i, (a, b) in enumerate(ends) if a != b)

    lines = set(range(first, max(first, last) + 1))
    for node in ast.walk(ast.parse(before)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else cast("int", node.end_lineno)
            statement = range(node.lineno, max(node.lineno, end) + 1)
            lines.update(statement if lines.intersection(statement) else ())
    return lines


def codes_of(code: CodeType, place: str = "") -> dict[str, CodeType]:
    """Return the code of each function in some code, by its place: names, and numbers of equal names."""
    codes: dict[str, CodeType] = {}
    seen: Counter[str] = Counter()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            where = f"{place}.{constant.co_name}#{seen[constant.co_name]}"
            seen[constant.co_name] += 1
            codes[where] = constant
            codes |= codes_of(constant, where)
    return codes


def behavior(code: CodeType) -> tuple[object, ...]:
    """Return what a code object does, without its lines."""
    constants = [
        behavior(constant) if isinstance(constant, CodeType) else (type(constant), repr(constant))
        for constant in code.co_consts
    ]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(constants))


class Mutant(NamedTuple):
    """A changed file, as the new code of some functions of this process."""

    text: str
    functions: dict[CodeType, CodeType]
    lines: set[int]


def objects() -> list[Any]:
    """Return what the garbage collector knows, and what conftest.py or a test has hidden from it."""
    gc.unfreeze()
    return gc.get_objects()


def mutants(source: str, seed: int) -> Iterator[Mutant]:
    """Make the mutants of a part in random order, except those that this process cannot become."""
    files = [
        file
        for name in source.split()
        for file in (
            [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
        )
    ]
    every = [(file, mutant) for file in files for mutant in mutants_of(file)]
    random.Random(seed).shuffle(every)

    living = {o.__code__ for o in objects() if type(o) is FunctionType}
    by_place = {(code.co_filename, code.co_name, code.co_firstlineno): code for code in living}
    for file, mutant in every:
        before, after = file.read_text(encoding="utf-8"), mutant()
        try:
            old = codes_of(compile(before, str(file), "exec"))
            new = codes_of(compile(after, str(file), "exec"))
        except SyntaxError:
            continue
        if set(old) != set(new) or observable(before) == observable(after):
            continue
        functions = {
            by_place[where]: new[place]
            for place, code in old.items()
            if behavior(code) != behavior(new[place])
            and (where := (code.co_filename, code.co_name, code.co_firstlineno)) in by_place
        }
        if functions:
            text = f"{file.relative_to(SOURCE).as_posix()}:{difference(before, after)}"
            yield Mutant(text, functions, changed_lines(before, after))


def become(mutant: Mutant) -> None:
    """Replace the code of each function of this process that a mutant changes."""
    for function in objects():
        if type(function) is FunctionType and function.__code__ in mutant.functions:
            function.__code__ = mutant.functions[function.__code__]
    for cached in caches():
        cached.cache_clear()


def caches() -> list[Any]:
    """Return the cached functions of modkit: what they returned before is not what a mutant returns."""
    kind = type(functools.cache(len))
    found = [value for value in objects() if type(value) is kind]
    return [value for value in found if value.__module__.startswith("modkit.")]


def tests_of(mutant: Mutant, recorded: CoverageData) -> tuple[set[str], set[str]]:
    """Return the tests that run the functions that a mutant changes, and those that run its lines."""
    by_function: set[str] = set()
    by_line: set[str] = set()
    for code in mutant.functions:
        contexts = recorded.contexts_by_lineno(code.co_filename)
        # The first line also runs when the function is defined, and has no instruction of its body.
        lines = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        by_function.update(test for line in lines for test in contexts.get(line, ()))
        by_line.update(test for line in mutant.lines for test in contexts.get(line, ()))
    return by_function, by_line


def run_test(item: pytest.Item, following: pytest.Item | None = None) -> None:
    """Run a test with the marks and the filters of warnings that pytest gives it."""
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)


@dataclass(eq=False)
class Runner:
    """A plugin of pytest: runs each test once, then the tests of each mutant."""

    source: str
    count: int
    seed: int
    minutes: float
    only: set[str]
    coverage: Coverage
    failed: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that has failed."""
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all of it, in place of pytest's own loop."""
        session.config.pluginmanager.unregister(name="terminalreporter")
        cached_functions = caches()
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            for cached in cached_functions:
                cached.cache_clear()
            self.coverage.switch_context(item.nodeid)
            started = time.monotonic()
            run_test(item, following)
            self.seconds[item.nodeid] = time.monotonic() - started
        self.coverage.stop()
        recorded = self.coverage.get_data()

        usable = [item for item in session.items if self.seconds[item.nodeid] < SLOW]
        usable.sort(key=lambda item: self.seconds[item.nodeid])
        # A test that fails, or does not end, in a forked process cannot tell a mutant there.
        untried = usable
        usable = []
        while untried:
            bad = self._first_failing(untried, Mutant("", {}, set()))
            names = [item.nodeid for item in untried]
            passed = names.index(bad) if bad in names else len(names)
            usable += untried[:passed]
            untried = untried[passed + 1 :]
            if bad:
                sys.stderr.write(f"left out: {bad}\n")
        sys.stderr.write(f"{len(usable)} of {len(session.items)} tests\n")

        ends = time.monotonic() + 60 * self.minutes
        for mutant in mutants(self.source, self.seed):
            wanted = len(self.only) or self.count
            if len(self.results) >= wanted or time.monotonic() > ends:
                break
            if self.only and mutant.text not in self.only:
                continue
            by_function, by_line = tests_of(mutant, recorded)
            # Without a context: the function runs only while modkit is imported.
            if by_function == {""}:
                continue
            chosen = [item for item in usable if item.nodeid in by_line]
            result = self._first_failing(chosen, mutant)
            self.results[mutant.text] = result
            sys.stderr.write(f"{len(self.results)} {result or 'SURVIVED'}: {mutant.text}\n")
        return True

    def _first_failing(self, items: list[pytest.Item], mutant: Mutant) -> str:
        """Return the first test that fails, crashes or hangs in a forked process, or an empty text."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.close(reader)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            try:
                become(mutant)
                self._run_until_one_fails(items, writer)
            finally:
                os._exit(0)

        os.close(writer)
        text = b""
        while select.select([reader], [], [], LIMIT)[0] and (data := os.read(reader, 65_536)):
            text += data
        # Also a child that has ended: processes that a test started are of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.close(reader)
        os.waitpid(child, 0)
        *_, last = ["no test could be started", *text.decode().splitlines()]
        return "" if last == "end" else last

    def _run_until_one_fails(self, items: list[pytest.Item], writer: int) -> None:
        """Write the name of each test that starts, and "end" if none has failed."""
        for item in items:
            os.write(writer, f"{item.nodeid}\n".encode())
            self.failed.clear()
            run_test(item)
            if self.failed:
                return
        os.write(writer, b"end\n")


def run_part(
    name: str, count: int, seed: int, minutes: float = math.inf, only: Iterable[str] = ()
) -> dict[str, Any]:
    """Run a sample of the mutants of one part; return the figures and the mutants that survived."""
    source, tests = PARTS[name]
    # From here on, since what runs when modkit is imported has no test.
    coverage = Coverage(data_file=None, source=[str(SOURCE)], config_file=False)
    coverage.start()
    runner = Runner(source, count, seed, minutes, set(only), coverage)
    paths = [str(ROOT / "tests" / path) for path in tests.split()]
    chosen = LEFT_OUT if name == "jit" else f"{LEFT_OUT} and {LEFT_OUT_BUT_IN_JIT}"
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "--timeout=0", "-k", chosen, *paths],
        plugins=[runner],
    )

    survived = [text for text, result in runner.results.items() if not result]
    sample = len(runner.results)
    return {"name": name, "sample": sample, "killed": sample - len(survived), "survived": survived}


def main() -> None:
    """Run the sample of each part, or of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants of each part")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop each part after that")
    parser.add_argument("--part", choices=[*PARTS])
    parser.add_argument(
        "--survivors", type=Path, help="only those that survived, by a file of --out"
    )
    parser.add_argument(
        "--out", type=Path, help="write the figures there, in place of printing them"
    )
    given = parser.parse_args()

    # A process for each part: pytest imports the tests of one into it.
    if given.part is None:
        for part in PARTS:
            os.spawnv(
                os.P_WAIT,
                sys.executable,
                [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--part", part],
            )
        return

    only = (
        json.loads(given.survivors.read_text(encoding="utf-8"))["survived"]
        if given.survivors
        else ()
    )
    figures = run_part(given.part, given.count, given.seed, given.minutes, only)
    if given.out:
        given.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        return
    sys.stdout.write(f"{given.part}: {figures['killed']} of {figures['sample']} are caught\n")
    sys.stdout.writelines(f"survived: {mutant}\n" for mutant in figures["survived"])


if __name__ == "__main__":
    main()
