"""`for_each`: many cases in one test, for cases without their own ids and marks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.helpers import clean_global_hooks, seed_everything


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# `pytest --unfold` sets it before the tests are imported.
unfolded = False


class _Axis(NamedTuple):
    names: list[str]
    values: Iterable[Any] | Callable[[], Iterable[Any]]
    ids: Iterable[str] | Callable[[Any], object] | None

    def cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label and the arguments of each value."""
        values = list(self.values() if callable(self.values) else self.values)
        labels: Iterable[Any] = values
        if self.ids is not None:
            ids = self.ids
            labels = [ids(value) for value in values] if callable(ids) else ids
        for value, label in zip(values, labels, strict=True):
            arguments = [value] if len(self.names) == 1 else value
            shown = getattr(label, "__name__", None) or repr(label)
            yield shown, dict(zip(self.names, arguments, strict=True))

    def parametrized(self) -> pytest.MarkDecorator:
        """Return the mark that makes an item of each value, with an id."""
        parameters, taken = [], set()
        for number, (label, arguments) in enumerate(self.cases()):
            name = label.strip("'\"")
            # An address changes from run to run, and a long text is not typed again.
            if not name or " at 0x" in name or len(name) > 60 or not name.isprintable():
                name = f"{'-'.join(self.names)}{number}"
            name = f"{name}-{number}" if name in taken else name
            taken.add(name)
            parameters.append(pytest.param(*arguments.values(), id=name))
        return pytest.mark.parametrize(self.names, parameters)


def for_each(
    names: str | tuple[str, ...],
    values: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Iterable[str] | Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each value, as `pytest.mark.parametrize` does, in one item.

    A pytest item takes longer than most cases. Every case runs, from the same random state, with a
    `tmp_path` and a `monkeypatch` of its own; the failure names all cases that fail. A row of
    `tests/divergences.py` needs items of its own, so tests with one use `pytest.mark.parametrize`. If
    `values` is a function, it is called when the test runs.

    With `pytest --unfold`, each case is an item, which `-k` and `--lf` can pick.
    """
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        if unfolded:
            mark = _Axis(split, values, ids).parametrized()
            marked: Callable[..., None] = pytest.mark.usefixtures("clean_hooks")(mark(test))
            return marked

        inner, axes = getattr(test, "folded", (test, []))
        axes = [_Axis(split, values, ids), *axes]

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed, skipped = [], []
            count = 0
            for case in itertools.product(*(axis.cases() for axis in axes)):
                label = ", ".join(shown for shown, _ in case)
                arguments = {name: value for _, one in case for name, value in one.items()}
                count += 1
                try:
                    _run_one(inner, arguments, fixtures, count)
                except pytest.skip.Exception as error:
                    skipped.append(error)
                except (Exception, pytest.fail.Exception) as error:
                    text = "".join(traceback.format_exception(error))
                    failed.append(f"case {label}\n{text}")
            assert count, "there are no cases"
            if failed:
                message = f"{len(failed)} of {count} cases failed; --unfold runs each by itself\n\n"
                message += "\n".join(failed)
                raise AssertionError(message)
            if len(skipped) == count:
                raise skipped[0]

        taken = {name for axis in axes for name in axis.names}
        signature = inspect.signature(inner)
        rest = [each for name, each in signature.parameters.items() if name not in taken]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        run.folded = (inner, axes)  # type: ignore[attr-defined]
        return run

    return decorate


def _run_one(
    test: Callable[..., None], arguments: dict[str, Any], fixtures: dict[str, Any], number: int
) -> None:
    """Run one case with its own folder and patches, and remove its global hooks."""
    fixtures = dict(fixtures)
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] = fixtures["tmp_path"] / str(number)
        fixtures["tmp_path"].mkdir()
    seed_everything()
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_global_hooks())
        if "monkeypatch" in fixtures:
            patch = fixtures["monkeypatch"].context()
            fixtures["monkeypatch"] = stack.enter_context(patch)
        test(**arguments, **fixtures)
