"""Run a random sample of the mutants that mutmut makes of the modules and of the averages.

python -m tests.mutation.sample --count 150 --seed 17

Mutmut's own runner does not fit: it leaves decorated functions out, as most of those of a module are, and calls
all others through a wrapper, where modkit compares functions by identity and warnings name a frame of the caller.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import get_ignored_lines

from tests.mutation.run import CAUGHT, FOUND, ROOT, copied, keep, run_tests, today


if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = {
    "_attributes": "module/test_registration module/test_registration_matrix module/test_bad_input "
    "module/test_classes fixes/test_members hooks/test_registration_hooks",
    "_conversion": "module/test_conversion module/test_conversion_flags fixes/test_ties "
    "fixes/test_memory_format module/test_modes",
    "_hooks": "hooks/test_registration "
    "fixes/test_backward_hooks hooks/test_copied_hooks hooks/test_bad_hooks hooks/test_backward",
    "_load_state_dict": "module/test_load_state_dict fixes/test_load module/test_load_overrides "
    "module/test_bad_load hooks/test_load_state_dict_hooks hooks/test_load_state_dict_results "
    "module/test_mixed_trees ../unit/test_load_state_dict",
    "_load_plan": "module/test_load_state_dict fixes/test_load module/test_load_overrides "
    "module/test_bad_load module/test_mixed_trees fixes/test_cycles",
    "_load_tensor": "module/test_load_state_dict fixes/test_load module/test_bad_load "
    "module/test_load_overrides",
    "_overrides": "module/test_override_contract module/test_call_order module/test_traversal "
    "fixes/test_cycles module/test_state_dict module/test_conversion",
    "_state_dict": "module/test_state_dict hooks/test_state_dict_hooks "
    "module/test_call_order fixes/test_cycles",
    "_traversal": "module/test_traversal fixes/test_hashing "
    "module/test_call_order fixes/test_cycles module/test_large_trees",
    "module": "module/test_classes module/test_override_contract "
    "module/test_conversion module/test_state_dict module/test_traversal ../unit/test_surface",
}
_AVERAGES = {
    "averages": "test_ema_update test_ema_precision test_flat_buffers test_ema_rebind test_ema_to "
    "test_ema_resume test_broken_states test_devices",
    "callback": "test_callback test_attach",
    "checkpoints": "test_checkpoints",
    "ema": "test_ema_update test_ema_swap test_ema_module test_attach test_ema_resume test_broken_states",
    "copies": "test_ema_update test_watch test_both_faces test_averaged_model_options",
    "engine": "test_ema_update test_watch test_masked_steps test_ema_rebind test_ema_to test_ema_resume "
    "test_both_faces test_ema_swap test_averaged_model_options",
    "foreign_states": "test_load_averages test_other_libraries test_broken_states",
    "named_tensors": "test_ema_update test_watch test_load_averages test_ema_rebind test_both_faces "
    "test_ema_module test_sharded",
    "names": "test_ema_update test_watch test_load_averages test_ema_rebind",
    "options": "test_ema_update test_both_faces test_averaged_model_options test_ema_to",
    "plan": "test_ema_update test_watch test_masked_steps test_flat_buffers test_both_faces "
    "test_averaged_model_options",
    "posthoc": "test_posthoc_files test_posthoc_fit test_posthoc_training",
    "precision": "test_ema_precision test_masked_steps test_ema_update test_averaged_model_options "
    "test_posthoc_files",
    "schedules": "test_schedules test_schedules_in_ema",
    "sharding": "test_sharded test_export_average",
    "state": "test_broken_states test_load_averages test_ema_resume test_other_libraries",
    "state_checks": "test_broken_states test_load_averages test_other_libraries",
    "swap": "test_ema_swap test_ema_module test_callback test_sharded",
    "watch": "test_watch test_ema_update test_ema_rebind test_ema_swap",
}
# The tests of each part and file, which alone are run for its mutants.
PARTS = {
    "nn": {file: [f"tests/parity/{t}.py" for t in all_.split()] for file, all_ in _MODULES.items()},
    "averaging": {
        file: [f"tests/unit/averaging/{t}.py" for t in all_.split()]
        for file, all_ in _AVERAGES.items()
    },
}
LIMIT = 900.0


class _Visitor(MutationVisitor):  # type: ignore[misc]
    """Finds mutations in decorated functions too, since the source itself is changed."""

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
    found = [one for one in visitor.mutations if one.contained_by_top_level_function is not None]
    return [partial(_replaced, module, one.original_node, one.mutated_node) for one in found]


def _replaced(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> str:
    code: str = cast("Any", module.deep_replace(old, new)).code
    return code


def difference(before: str, after: str) -> str:
    """Return the first line that differs, before and after."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    number, (old, new) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
    return f"{number}: {old.strip()} -> {new.strip()}"


def run_part(
    name: str, count: int, seed: int, folder: Path, minutes: float = math.inf
) -> dict[str, Any]:
    """Run a sample of the mutants of one part; return the figures and the mutants that survived."""
    ends = time.monotonic() + 60 * minutes
    sources = {
        file: mutants_of(ROOT / "src" / "modkit" / name / f"{file}.py") for file in PARTS[name]
    }
    every = [(file, number) for file, mutants in sources.items() for number in range(len(mutants))]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    found: dict[str, Any] = {"name": name, "mutants": len(every), "sample": 0}
    found |= {"killed": 0, "timeout": 0, "survived": []}
    for file, number in chosen:
        if time.monotonic() > ends:
            break
        found["sample"] += 1
        path = folder / "src" / "modkit" / name / f"{file}.py"
        intact, mutant = path.read_text(encoding="utf-8"), sources[file][number]()
        path.write_text(mutant, encoding="utf-8")
        status, failed = run_tests(
            folder, "-x", "-o", "timeout=120", *PARTS[name][file], limit=LIMIT
        )
        path.write_text(intact, encoding="utf-8")
        what = f"{file}.py:{difference(intact, mutant)}"
        if status in CAUGHT:
            found["killed"] += 1
        elif status:
            found["timeout"] += 1
        else:
            found["survived"].append(what)
        sys.stdout.write(f"{name} {failed[0] if failed else status or 'SURVIVED'}: {what}\n")
        sys.stdout.flush()
    return found


def main() -> None:
    """Run the sample of each part, or of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants of each part")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop each part after that")
    parser.add_argument("--part", choices=[*PARTS])
    given = parser.parse_args()
    known = (
        json.loads(FOUND.read_text(encoding="utf-8")).get("sample", {}) if FOUND.exists() else {}
    )
    parts = {part["name"]: part for part in known.get("parts", [])}
    with tempfile.TemporaryDirectory() as name:
        folder = copied(Path(name))
        for part in [given.part] if given.part else PARTS:
            parts[part] = run_part(part, given.count, given.seed, folder, given.minutes)
    figures = {**today(), "seed": given.seed, "mutmut": version("mutmut")}
    keep(sample={**known, **figures, "parts": [parts[part] for part in PARTS if part in parts]})


if __name__ == "__main__":
    main()
