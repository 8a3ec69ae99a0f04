"""Bugs to plant, one at a time: each mechanism of modules, each file of averages, files and TorchScript."""

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

_NN: Final = [
    Bug(
        "registration: a hook that returns None loses what an earlier hook returned",
        "nn/_attributes.py",
        "result = result if replacement is None else replacement",
        "result = value if replacement is None else replacement",
        _HOOKS + "/test_registration_hooks.py",
    ),
    Bug(
        "backward hooks: a pre-hook that returns a tensor",
        "nn/_hooks.py",
        "return (result,) if isinstance(result, torch.Tensor) else result",
        "return result",
        _HOOKS + "/test_backward_hooks.py",
    ),
    Bug(
        "state_dict: a missing detach",
        "nn/_state_dict.py",
        "parameter if keep_vars else parameter.detach()",
        "parameter",
        _MODULE + "/test_state_dict.py",
    ),
    Bug(
        "state_dict: versions under another name",
        "nn/_state_dict.py",
        "        destination._metadata[path] = metadata",
        "        destination._metadata[prefix] = metadata",
        _MODULE + "/test_state_dict.py",
    ),
    Bug(
        "state_dict: an override of an instance",
        "nn/_state_dict.py",
        '"state_dict" in state or "_save_to_state_dict" in state',
        '"_save_to_state_dict" in state',
        _MODULE + "/test_override_contract.py",
    ),
    Bug(
        "load: unexpected keys although strict=False",
        "nn/_load_plan.py",
        "            if strict and keys:",
        "            if keys and (strict or keys is self.unexpected):",
        _HOOKS + "/test_load_state_dict_hooks.py",
    ),
    Bug(
        "load: keys below a child that is None",
        "nn/_load_state_dict.py",
        "elif module._modules.get(name) is None and not (",
        "elif name not in module._modules and not (",
        _FIXES + "/test_load.py",
    ),
    Bug(
        "load: a key that may belong to two tensors",
        "nn/_load_plan.py",
        '            if plan is not None and "." in name:',
        '            if plan is not None and name == ".":',
        _MODULE + "/test_load_overrides.py",
    ),
    Bug(
        "load_matching: a tied parameter counts as missing",
        "nn/_load_matching.py",
        "if name in missing and id(targets[name]) not in written",
        "if name in missing",
        "tests/unit/load/test_load_matching.py",
    ),
    Bug(
        "failed load: one of two prefixes is taken as certain",
        "_renames.py",
        "    is_certain = len(rivals) == 1",
        "    is_certain = True",
        "tests/unit/load/test_failed_load.py",
    ),
    Bug(
        "tree: a module without children is not left",
        "_tree.py",
        "                leave(child, entered)",
        "                pass",
        _MODULE + "/test_conversion.py",
    ),
    Bug(
        "tree: a module that was left counts as a parent",
        "_tree.py",
        "            active.discard(id(parent))\n",
        "",
        _FIXES + "/test_cycles.py",
    ),
    Bug(
        "load: the flag of assign stays in the state dict",
        "nn/_load_plan.py",
        "dict(self.metadata.get(prefix[:-1], {}))",
        "self.metadata.get(prefix[:-1], {})",
        _FIXES + "/test_load.py",
    ),
    Bug(
        "load: tied parameters come apart",
        "nn/_load_tensor.py",
        "        ties[key] = (target, value, parameter)\n    return ties[key][2]",
        "        return parameter\n    return ties[key][2]",
        _FIXES + "/test_load.py",
    ),
    Bug(
        "load: requires_grad of an assigned parameter",
        "nn/_load_tensor.py",
        "        value.requires_grad_(requires_grad)\n        return value",
        "        return value",
        _MODULE + "/test_load_state_dict.py",
    ),
    Bug(
        "conversion: ties of what is replaced",
        "nn/_conversion.py",
        "                replaced.note(current, result)\n",
        "                pass\n",
        _FIXES + "/test_ties.py",
    ),
    Bug(
        "conversion: a move to another device with the same dtype",
        "nn/_conversion.py",
        "        ) and (device is None or tensor.device == device)\n",
        "        )\n",
        _MODULE + "/test_conversion.py",
    ),
    Bug(
        "modes: a class with a property called training",
        "nn/_conversion.py",
        '            and getattr(cls, "training", None) is None\n',
        "",
        "tests/parity/module/test_modes.py",
    ),
    Bug(
        "traversal: a tied parameter is yielded twice",
        "nn/_traversal.py",
        "if parameter is not None and id(parameter) not in seen:",
        "if parameter is not None:",
        _MODULE + "/test_traversal.py",
    ),
    Bug(
        "traversal: the path to an override, by one off",
        "nn/_traversal.py",
        "name = names[-1 - left]",
        "name = names[-left]",
        _MODULE + "/test_traversal.py",
    ),
    Bug(
        "overrides: a method that is set on an instance",
        "nn/_overrides.py",
        "            or name in module.__dict__\n",
        "",
        _MODULE + "/test_override_contract.py",
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
        _MODULE + "/test_classes.py",
    ),
    Bug(
        "metaclass: isinstance of a module of torch",
        "nn/module.py",
        "            return isinstance(instance, TorchModule)",
        "            return type.__instancecheck__(cls, instance)",
        _MODULE + "/test_override_contract.py",
    ),
    Bug(
        "fast_inference: a table that was changed is not followed",
        "fast_inference/members.py",
        "            self.changed = True\n",
        "            self.changed = False\n",
        _SCOPE + "/test_changes.py",
    ),
]

_AVERAGING: Final = [
    Bug(
        "flat buffers: the size of an element",
        "averaging/averages.py",
        "            offset += size * dtype.itemsize",
        "            offset += size * 4",
        _EMA + "/test_flat_buffers.py",
    ),
    Bug(
        "averages: a model on another device is not followed",
        "averaging/averages.py",
        "                if name in stored and stored[name].device != device:",
        "                if name in stored and stored[name].device.type == device:",
        _EMA + "/test_devices.py",
    ),
    Bug(
        "EMA.module: a reference keeps the memory of former averages",
        "averaging/averaged_copy.py",
        "            if is_average and (value.dtype, value.device) == place:",
        "            if is_average and not self._shared and (value.dtype, value.device) == place:",
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
        "attach: a step that raised is taken for one in progress",
        "averaging/optimizer_steps.py",
        "        return [indices[table] for table in tables if table in indices] or [index]",
        "        return [index] * calls",
        _EMA + "/test_attached_steps.py",
    ),
    Bug(
        "callback: modes of single modules after an evaluation",
        "averaging/callback.py",
        "            for module, training in modes:\n                module.training = training",
        "            self.model.train(modes[0][1])",
        _EMA + "/test_callback.py",
    ),
    Bug(
        "average_checkpoints: the share of a file in the mean so far",
        "averaging/checkpoints.py",
        "        fraction = share / total if total else 0.0",
        "        fraction = share / sum(shares)",
        _EMA + "/test_checkpoints.py",
    ),
    Bug(
        "copies: a buffer that a forward has replaced",
        "averaging/copies.py",
        "        self.watch = Watch(tensors=tensors, tables=tables.values())",
        "        self.watch = Watch(tensors=tensors)",
        _EMA + "/test_ema_update.py",
    ),
    Bug(
        "EMA: update_every counts from the wrong step",
        "averaging/ema.py",
        "if start is None else count % every == 0",
        "if start is None else step % every == 0",
        _EMA + "/test_ema_update.py",
    ),
    Bug(
        "EMA: restore() keeps what was stored",
        "averaging/ema.py",
        "            self._stored = {}\n            self._overwritten = []\n",
        "            self._overwritten = []\n",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "plans: the plan of a model that has changed",
        "averaging/plan.py",
        "            or value.watch.changed()\n",
        "",
        _EMA + "/test_ema_rebind.py",
    ),
    Bug(
        "foreign states: the copy that torch_ema makes when it is created",
        "averaging/foreign_states.py",
        'calls = checked.integer("num_updates") + 1 if counts else None',
        'calls = checked.integer("num_updates") if counts else None',
        _EMA + "/test_other_libraries.py",
    ),
    Bug(
        "engine: the average of a parameter that has another name now",
        "averaging/engine.py",
        "elif former == name or self._seen[former][1] == _address(member.tensor):",
        "elif former == name:",
        _EMA + "/test_ema_rebind.py",
    ),
    Bug(
        "groups: tensors that have no average are taken for ones that have",
        "averaging/groups.py",
        "            has_average=precision.is_averaged(average),\n",
        "            has_average=True,\n",
        "tests/parity/averaging/test_n_averaged.py",
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
        "averaging/names.py",
        '    while len(parts) > 1 and parts[0] == "module":',
        '    if len(parts) > 1 and parts[0] == "module":',
        _EMA + "/test_watch.py",
    ),
    Bug(
        "names: the further names of tied tensors",
        "averaging/named_tensors.py",
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
        "states: a number that other libraries save as a tensor",
        "averaging/state_checks.py",
        "is_number and self.source not in (OWN, OWN_POSTHOC)",
        "is_number and self.source in (OWN, OWN_POSTHOC)",
        _EMA + "/test_other_libraries.py",
    ),
    Bug(
        "watch: a member in a table that was empty",
        "averaging/watch.py",
        "            or any(self._empty)\n",
        "",
        _EMA + "/test_watch.py",
    ),
    Bug(
        "snapshots: the step of the latest update",
        "averaging/posthoc.py",
        "self.step - self.step % self._update_every\n",
        "self.step\n",
        _EMA + "/test_posthoc_training.py",
    ),
    Bug(
        "precision: the error terms of a copy",
        "averaging/precision.py",
        "    for error in errors:\n        error.zero_()\n",
        "",
        _EMA + "/test_ema_precision.py",
    ),
    Bug(
        "precision: a mean over the elements hides an overflow",
        "averaging/precision.py",
        "tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)",
        "tensor.nansum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)",
        _EMA + "/test_masked_steps.py",
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
        "sharding: lists inside of a state",
        "averaging/sharding.py",
        "    if isinstance(state, list):\n        return [whole(value) for value in state]\n",
        "",
        _EMA + "/test_sharded.py",
    ),
    Bug(
        "states: more updates than steps",
        "averaging/state.py",
        'checked.integer("n_averaged", 0, counts["step"] - start + 1)',
        'checked.integer("n_averaged", 0, counts["step"])',
        _EMA + "/test_broken_states.py",
    ),
    Bug(
        "swap: blocks that are left out of order",
        "averaging/swap.py",
        "                above.raws[above._index[id(tensor)]] = raw\n",
        "                pass\n",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "swap: members that were replaced stay replaced",
        "averaging/swap.py",
        "replaced = None if registered is None else registered.undo()",
        "replaced = None",
        _EMA + "/test_ema_swap.py",
    ),
    Bug(
        "swap: it is registered after its first write",
        "averaging/swap.py",
        "        active_swaps.append(self)\n        self._exchange(values)\n",
        "        self._exchange(values)\n        active_swaps.append(self)\n",
        _EMA + "/test_interrupts.py",
    ),
    Bug(
        "interrupts: signals do not wait for the end of an update",
        "averaging/interrupts.py",
        "_signals.signal(number, self._wait)",
        "pass",
        _EMA + "/test_interrupts.py",
    ),
    Bug(
        "swap: a write inside a block is not noticed",
        "averaging/swap.py",
        "pointers == self._pointers and versions == self.versions",
        "pointers == self._pointers",
        _EMA + "/test_ema_swap.py",
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
        "operating systems: a read where the last one ended",
        "files/operating_system.py",
        "os.SEEK_SET",
        "os.SEEK_CUR",
        _FILES + "/test_operating_system.py",
    ),
    Bug(
        "writing: the mode of the file that is replaced",
        "files/atomic_write.py",
        "            mode = previous.st_mode\n",
        "            pass\n",
        _FILES + "/test_write_faults.py",
    ),
    Bug(
        "safetensors: the padding of the header",
        "files/safetensors_files.py",
        '    encoded += b" " * (-len(encoded) % _ALIGNMENT)\n',
        "",
        _FILES + "/test_safetensors_files.py",
    ),
    Bug(
        "checkpoints: a transposed view counts as tied",
        "files/tensor_files.py",
        "tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype",
        "tensor.data_ptr(), tensor.shape, tensor.dtype",
        _EMA + "/test_checkpoints.py",
    ),
    Bug(
        "inspect: the size of a sharded checkpoint",
        "files/inspect.py",
        "for path in (file, *checkpoint.files))",
        "for path in checkpoint.files)",
        _FILES + "/test_inspect.py",
    ),
    Bug(
        "digests: capital letters",
        "files/kinds.py",
        "sha256.strip().lower()",
        "sha256.strip()",
        _FILES + "/test_verify.py",
    ),
    Bug(
        "saving: objects that are written as a name",
        "files/checkpoint_values.py",
        "        if self.by_name[kind]:\n            self._check(obj, obj.__reduce_ex__(2))\n",
        "",
        _FILES + "/test_checkpoint_values.py",
    ),
    Bug(
        "limits: a storage that is smaller than stated",
        "files/pickle_limits.py",
        "member is not None and size != member.size",
        "member is not None and size < member.size",
        _FILES + "/test_hostile_pickles.py",
    ),
    Bug(
        "limits: the memory that a call takes",
        "files/pickle_limits.py",
        "        self._spend(_REBUILD_COST if is_rebuilt else",
        "        (_REBUILD_COST if is_rebuilt else",
        _FILES + "/test_pickle_limits.py",
    ),
    Bug(
        "checksums: two writers at once",
        "files/checkpoints.py",
        "_CRC_OPTIONS.pop())",
        "_CRC_OPTIONS.pop(0))",
        _FILES + "/test_checkpoint_files.py",
    ),
    Bug(
        "checksums: a storage that was compared already",
        "files/checkpoints.py",
        "        self._intact.add(address)",
        "        self._intact.add(size)",
        _FILES + "/test_checkpoint_files.py",
    ),
    Bug(
        "plain state dicts: a tensor beyond the end of its storage",
        "files/plain_unpickler.py",
        "    if (last + 1) * element.itemsize > stored.nbytes and 0 not in size:\n",
        "    if last * element.itemsize > stored.nbytes and 0 not in size:\n",
        _FILES + "/test_plain_unpickler.py",
    ),
    Bug(
        "plain state dicts: a tuple of more than numbers",
        "files/plain_unpickler.py",
        "  | NUMBER TUPLE1\n",
        "  | TUPLE1\n",
        _FILES + "/test_plain_unpickler.py",
    ),
    Bug(
        "TorchScript: the pickle of the inputs of a trace",
        "files/torchscript_files.py",
        "name in _PICKLES or name == _SHAPES or name.endswith(_LINES)",
        "name in _PICKLES or name.endswith(_LINES)",
        _FILES + "/test_small_members.py",
    ),
    Bug(
        "zip files: names that differ in case",
        "files/zip_archive.py",
        "            names_in_lower_case.add(short.lower())",
        "            names_in_lower_case.add(short)",
        _FILES + "/test_hostile_zip.py",
    ),
    Bug(
        "zip files: a number that its field has room for, from the extra field",
        "files/zip_records.py",
        "return [next(numbers, n) if n == IN_ZIP64_32 else n for n in short]",
        "return [next(numbers, n) for n in short]",
        _FILES + "/test_zip_records.py",
    ),
]

_IN_JIT: Final = [
    Bug(
        "the namespace: save() is that of torch",
        "jit/__init__.py",
        '        "save",\n',
        "",
        _JIT + "/test_namespace.py",
    ),
    Bug(
        "archives: a record of another archive",
        "jit/_archives.py",
        "    files.pop(RECORD, None)\n",
        "",
        _JIT + "/test_files.py",
    ),
    Bug(
        "members: a child that is replaced in Python alone",
        "jit/_attributes.py",
        "        self._cpp.setattr(name, value)\n",
        "",
        _JIT + "/test_members.py",
    ),
    Bug(
        "copies: hook tables shared with the original",
        "jit/_copies.py",
        "value.copy() if name in _HOOKS else value",
        "value",
        _JIT + "/test_members.py",
    ),
    Bug(
        "wrappers: gradients of loaded parameters",
        "jit/_from_torch.py",
        "                parameter.grad = tensor.grad\n",
        "",
        _JIT + "/test_files.py",
    ),
    Bug(
        "map_location: an error of the caller's function is one of the file",
        "files/storages.py",
        "            self.error = error\n",
        "            self.error = None\n",
        _FILES + "/test_map_location.py",
    ),
    Bug(
        "load: weights and constants with the same key",
        "files/torchscript_files.py",
        "        len({*tensors.values()}) < len(tensors)\n",
        "        len(tensors) < 0\n",
        "tests/unit/jit/test_parts.py",
    ),
    Bug(
        "load: the digest is not compared",
        "jit/_save_and_load.py",
        "with verified_archive(f, sha256, in_parts",
        "with verified_archive(f, None, in_parts",
        "tests/unit/jit/test_load.py",
    ),
    Bug(
        "compiled types: define() on one of two instances",
        "jit/_script_module.py",
        "share_types=not defined",
        "share_types=True",
        _JIT + "/test_defects.py",
    ),
    Bug(
        "script: names of the scope of the caller",
        "jit/_script_trace_freeze.py",
        "_frames_up + 1, _rcb",
        "_frames_up, _rcb",
        _JIT + "/test_compiling.py",
    ),
    Bug(
        "notice: the next call after the warning was an error",
        "jit/_upstream.py",
        "    warnings.warn_explicit(message(function)",
        "    _given.clear()\n    warnings.warn_explicit(message(function)",
        "tests/unit/jit/test_environment.py",
    ),
]

_IN_MIGRATIONS: Final = [
    Bug(
        "patterns: a pattern that matches a part of a name",
        "migrations/patterns.py",
        "or re.escape(s) for s in segments))",
        'or re.escape(s) for s in segments) + ".*")',
        _MIGRATIONS + "/test_migrate.py",
    ),
    Bug(
        "steps: a stack in the order of the file",
        "migrations/steps.py",
        "keys = tuple(map(str, range(len(members)))) if stacks",
        "keys = tuple(members) if stacks",
        _MIGRATIONS + "/test_migrate.py",
    ),
    Bug(
        "versions: a state dict that may be of two versions",
        "migrations/versions.py",
        "if other.rank() == best.rank() and other.effects != best.effects:",
        "if other.rank() < best.rank() and other.effects != best.effects:",
        _MIGRATIONS + "/test_refusals.py",
    ),
    Bug(
        "walk: a child migrates under the prefix before its parent's steps",
        "migrations/state_dicts.py",
        "        upwards(child, subtree)\n        return subtree",
        "        return subtree",
        _MIGRATIONS + "/test_migrate.py",
    ),
    Bug(
        "optimizers: a merged parameter of several groups",
        "migrations/optimizers.py",
        "if len(candidates) != 1:",
        "if not candidates:",
        _MIGRATIONS + "/test_optimizers.py",
    ),
    Bug(
        "declarations: a base that declares migrates again",
        "migrations/declarations.py",
        " and _DONE not in local_metadata:",
        ":",
        _MIGRATIONS + "/test_load.py",
    ),
    Bug(
        "files: a source that was replaced",
        "migrations/files.py",
        "if self._identify() != self._identity:",
        "if len(self._identify()) != len(self._identity):",
        _MIGRATIONS + "/test_files.py",
    ),
    Bug(
        "recorded: names that changed without a version",
        "migrations/recorded.py",
        'if record["versions"] == versions and',
        'if record["versions"] != versions and',
        _MIGRATIONS + "/test_recorded.py",
    ),
]

BUGS: Final = (*_NN, *_AVERAGING, *_IN_FILES, *_IN_JIT, *_IN_MIGRATIONS)
