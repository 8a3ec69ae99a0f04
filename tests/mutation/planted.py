"""Bugs to plant, one at a time, about what modkit promises: at most 40, so that code can move."""

from typing import Final, NamedTuple


class Bug(NamedTuple):
    """A change of one place that the tests must notice.

    Attributes:
        mechanism: What breaks.
        file: A file below ``src/modkit``.
        old: Text that stands there exactly once.
        new: What it is replaced by.
        tests: Where it should be caught; all tests run if it is not.
    """

    mechanism: str
    file: str
    old: str
    new: str
    tests: str


_MODULE: Final = "tests/parity/module"
_HOOKS: Final = "tests/parity/hooks"
_FIXES: Final = "tests/parity/fixes"
_SCOPE: Final = "tests/parity/fast_inference"
_EMA: Final = "tests/unit/averaging"
_FILES: Final = "tests/unit/files"
_JIT: Final = "tests/parity/jit"
_MIGRATIONS: Final = "tests/unit/migrations"
_RANKS: Final = "tests/distributed/averages"

_NN: Final = [
    Bug(
        "errors: pickled as most exceptions are, by their arguments alone",
        "errors.py",
        "return ValueError.__new__, (type(self), *self.args), vars(self)",
        "return type(self), self.args",
        "tests/unit/test_public_face.py",
    ),
    Bug(
        "backward hooks: a pre-hook that returns a tensor",
        "nn/_hooks.py",
        "return (result,) if isinstance(result, torch.Tensor) else result",
        "return result",
        _HOOKS + "/test_backward_hooks.py",
    ),
    Bug(
        "load: unexpected keys although strict=False",
        "nn/_load_plan.py",
        "            if strict and keys:",
        "            if keys and (strict or keys is self.unexpected):",
        _HOOKS + "/test_load_state_dict_hooks.py",
    ),
    Bug(
        "load: a key that may belong to two tensors",
        "nn/_load_plan.py",
        '            if plan is not None and "." in name:',
        '            if plan is not None and name == ".":',
        _MODULE + "/test_load_overrides.py",
    ),
    Bug(
        "failed load: one of two prefixes is taken as certain",
        "_renames.py",
        "    is_certain = len(rivals) == 1",
        "    is_certain = True",
        "tests/unit/load/test_failed_load.py",
    ),
    Bug(
        "load: tied parameters come apart",
        "nn/_load_tensor.py",
        "        ties[key] = (target, value, parameter)\n    return ties[key][2]",
        "        return parameter\n    return ties[key][2]",
        _FIXES + "/test_load.py",
    ),
    Bug(
        "conversion: ties of what is replaced",
        "nn/_conversion.py",
        "                replaced.note(current, result)\n",
        "                pass\n",
        _FIXES + "/test_ties.py",
    ),
    Bug(
        "overrides: a patch of torch.nn.Module that comes late",
        "nn/_overrides.py",
        "is_dynamo_compiling() or getattr(TorchModule, name) is not original",
        "is_dynamo_compiling()",
        _MODULE + "/test_override_contract.py",
    ),
    Bug(
        "metaclass: the place of Module among the bases",
        "nn/module.py",
        "order.insert(order.index(TorchModule), Module)",
        "order.insert(1, Module)",
        _MODULE + "/test_override_contract.py",
    ),
    Bug(
        "fast_inference: a table that was changed is not followed",
        "_fast_inference/members.py",
        "            self.changed = True\n",
        "            self.changed = False\n",
        _SCOPE + "/test_scope.py",
    ),
]

_AVERAGING: Final = [
    Bug(
        "watch: a table of members that is replaced",
        "averaging/recipe.py",
        "            if not all(map(operator.is_, lasting, self._tables)):\n                return True",
        "            if False:\n                return True",
        "tests/parity/averaging/test_changes_between_updates.py",
    ),
    Bug(
        "engine: averages that a refused first step has left",
        "averaging/engine.py",
        "        if self.begun:\n            self._check_averaged(averaged)",
        "        if self.averages[0].tensors:\n            self._check_averaged(averaged)",
        _EMA + "/test_ema_update.py",
    ),
    Bug(
        "EMA.module: a reference keeps the memory of former averages",
        "averaging/engine.py",
        "                copied = value is source\n",
        "                copied = True\n",
        _EMA + "/test_ema_module.py",
    ),
    Bug(
        "update_bn: the layer keeps its momentum",
        "averaging/batch_norm.py",
        "                layer.momentum = None",
        "                layer.momentum = layer.momentum or None",
        _EMA + "/test_ema_update_bn.py",
    ),
    Bug(
        "attach: a step inside a step of the same optimizer counts",
        "averaging/optimizer_steps.py",
        "is table for other in stepping) > 1",
        "is table for other in stepping) > 2",
        _EMA + "/test_attached_steps.py",
    ),
    Bug(
        "average_checkpoints: the share of a file in the mean so far",
        "averaging/checkpoints.py",
        "        fraction = shares[index] / total if total else 0.0",
        "        fraction = shares[index] / sum(shares)",
        _EMA + "/test_checkpoints.py",
    ),
    Bug(
        "EMA: update_every counts from the wrong step",
        "averaging/ema.py",
        "if start is None else count % every == 0",
        "if start is None else step % every == 0",
        _EMA + "/test_ema_update.py",
    ),
    Bug(
        "rules: a step that the device skips is not undone",
        "averaging/rules.py",
        "            where_(~later, tensors, before)\n",
        "",
        _EMA + "/test_masked_steps.py",
    ),
    Bug(
        "names: several wrappers around a model",
        "averaging/tensors.py",
        '    while stripped and all(name.startswith("module.") for name in stripped.values()):',
        '    if stripped and all(name.startswith("module.") for name in stripped.values()):',
        _EMA + "/test_watch.py",
    ),
    Bug(
        "names: the further names of tied tensors",
        "averaging/tensors.py",
        "        return {*self.parameters, *self.buffers, *self.aliases}",
        "        return {*self.parameters, *self.buffers}",
        _EMA + "/test_ema_rebind.py",
    ),
    Bug(
        "options: a parameter that was averaged before it was frozen",
        "averaging/options.py",
        "trains = not self.trainable_only or member.tensor.requires_grad or name in averaged",
        "trains = not self.trainable_only or member.tensor.requires_grad",
        _EMA + "/test_ema_rebind.py",
    ),
    Bug(
        "watch: a member in a table that was empty",
        "averaging/recipe.py",
        "            or any(self._empty)\n",
        "",
        _EMA + "/test_watch.py",
    ),
    Bug(
        "snapshots: those that a resume has given up",
        "averaging/posthoc.py",
        "snapshot.step > self.step > 0",
        "snapshot.step < self.step < 0",
        _EMA + "/test_posthoc_runs.py",
    ),
    Bug(
        "schedules: the equal average of every k-th model",
        "averaging/schedules.py",
        "        return n / (n + k)",
        "        return n / (n + 1)",
        _EMA + "/test_schedules.py",
    ),
    Bug(
        "schedules: a decay of exactly 1",
        "averaging/schedules.py",
        "else 0.0\n        return float(decay) if 0.0 <= decay <= 1.0 else self._refuse(decay, n)\n\n    def to_config",
        "else 0.0\n        return float(decay) if 0.0 <= decay < 1.0 else self._refuse(decay, n)\n\n    def to_config",
        _EMA + "/test_schedules.py",
    ),
    Bug(
        "groups: subclasses are averaged in a list with plain tensors",
        "averaging/rules.py",
        "*(_kind(average), _kind(current), name if alone else None),",
        "*(name if alone else None,),",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "swap: blocks that are left out of order",
        "averaging/swap.py",
        "                above.raws[above._pairing.places[id(tensor)]] = raw\n",
        "                pass\n",
        _EMA + "/test_blocks_in_any_order.py",
    ),
    Bug(
        "swap: members that were replaced stay replaced",
        "averaging/swap.py",
        "replaced = pairing.put_back() if has_changed else []",
        "replaced = []",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "swap: casts of parameters that autocast has kept",
        "averaging/swap.py",
        "        self._exchange(self._values)\n        forget_casts()\n",
        "        self._exchange(self._values)\n",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "sharding: a tensor with other placements than the one it is for",
        "averaging/sharding.py",
        "    if is_sharded_alike(value, like):\n        return value",
        "    if is_sharded(value):\n        return value",
        _RANKS + "/test_placements.py",
    ),
]

_IN_FILES: Final = [
    Bug(
        "writing: a forgotten fsync",
        "files/atomic_write.py",
        "        flush(unfinished)\n",
        "",
        _FILES + "/test_atomic_write.py",
    ),
    Bug(
        "writing: the mode of the file that is replaced",
        "files/atomic_write.py",
        "            mode = previous.st_mode\n",
        "            pass\n",
        _FILES + "/test_write_faults.py",
    ),
    Bug(
        "limits: a storage that is smaller than stated",
        "files/zip_archive.py",
        "if member is None or member.file_size != stored.nbytes:",
        "if member is None or member.file_size > stored.nbytes:",
        _FILES + "/test_hostile_pickles.py",
    ),
    Bug(
        "zip files: names that differ in case",
        "files/zip_archive.py",
        "len({member.filename.lower() for member in entries})",
        "len({member.filename for member in entries})",
        _FILES + "/test_hostile_zip.py",
    ),
]

_IN_JIT: Final = [
    Bug(
        "load: the digest is not compared",
        "jit/_save_and_load.py",
        "with verified_archive(f, sha256)",
        "with verified_archive(f, None)",
        "tests/unit/jit/test_load.py",
    ),
]

_IN_MIGRATIONS: Final = [
    Bug(
        "patterns: a pattern that matches a part of a name",
        "migrations/patterns.py",
        'return part != "" if segment in _WILDCARDS else segment == part',
        'return part != "" if segment in _WILDCARDS else segment in part',
        _MIGRATIONS + "/test_migrate.py",
    ),
    Bug(
        "versions: a state dict that may be of two versions",
        "migrations/versions.py",
        "if other.rank() == best.rank() and other.effects != best.effects:",
        "if other.rank() < best.rank() and other.effects != best.effects:",
        _MIGRATIONS + "/test_refusals.py",
    ),
]

BUGS: Final = (*_NN, *_AVERAGING, *_IN_FILES, *_IN_JIT, *_IN_MIGRATIONS)
