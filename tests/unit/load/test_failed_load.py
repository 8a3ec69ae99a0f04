import ast
import os
import random
import re
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import modkit
import modkit.nn
from modkit import _mismatches
from modkit._renames import find_renames
from tests.cases import for_each
from tests.processes import python
from tests.unit.load.mismatches import FRESH, KINDS, LIBRARIES, batch_norm, vit


NOTES = sys.version_info >= (3, 11)
needs_notes = pytest.mark.skipif(not NOTES, reason="needs notes on exceptions: Python 3.11")


def tensors(value):
    """Make tensors without data of the shapes in a checkpoint."""
    if isinstance(value, tuple):
        return torch.empty(value, device="meta")
    if isinstance(value, dict):
        return {key: tensors(inner) for key, inner in value.items()}
    return value


class Net(modkit.nn.Module):
    """A network with parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.body = modkit.nn.Linear(4, 6)
        self.norm = modkit.nn.BatchNorm1d(6)


def prefixed(prefix, module):
    """Return the state dict of a module with a prefix."""
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


@for_each("mismatch", [*KINDS, *LIBRARIES, *FRESH], ids=lambda mismatch: mismatch.name)
def test_the_cause_is_named(mismatch):
    """It is in the first three of at most eight lines."""
    lines = _mismatches.explain(mismatch.model, tensors(mismatch.checkpoint))

    assert 0 < len(lines) <= 8
    for cause in mismatch.causes:
        assert re.search(cause, "\n".join(lines[:3]))


@for_each("mismatch", [*KINDS, *LIBRARIES, *FRESH], ids=lambda mismatch: mismatch.name)
def test_what_is_certain_is_true(mismatch, monkeypatch):
    """Each pair of names that is taken as certain is one tensor."""
    found = []

    def recorded(*args):
        found.append(find_renames(*args))
        return found[-1]

    monkeypatch.setattr(_mismatches, "find_renames", recorded)
    _mismatches.explain(mismatch.model, tensors(mismatch.checkpoint))
    pairs = {old: new for renames in found for old, new in renames.pairs.items()}

    assert pairs.items() <= mismatch.truth.items()


def test_lines_do_not_depend_on_hashes():
    """A process with other hashes of strings says the same."""
    code = """
from modkit import _mismatches
from tests.unit.load.mismatches import FRESH, KINDS, LIBRARIES
from tests.unit.load.test_failed_load import tensors
for mismatch in (*KINDS, *LIBRARIES, *FRESH):
    print(_mismatches.explain(mismatch.model, tensors(mismatch.checkpoint)))
"""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [
        str(_mismatches.explain(mismatch.model, tensors(mismatch.checkpoint)))
        for mismatch in (*KINDS, *LIBRARIES, *FRESH)
    ]

    assert done.stdout.splitlines() == lines


@needs_notes
@for_each("load", [Net.load_state_dict, modkit.load_state_dict], ids=["method", "function"])
def test_the_error_is_torchs_with_a_note(load):
    """Type and text are those of torch; the cause stands below."""
    state = prefixed("module.", Net())
    with pytest.raises(RuntimeError) as expected:
        torch.nn.Module.load_state_dict(Net(), state)
    with pytest.raises(RuntimeError) as caught:
        load(Net(), state)

    assert type(caught.value) is type(expected.value)
    assert str(caught.value) == str(expected.value)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "all 7 names of the checkpoint have the extra prefix 'module.' (added by Data"
    )
    assert note.endswith("pass strip='module.' to modkit.load_matching()")


def test_a_load_that_succeeds_imports_nothing():
    """The diagnosis is imported by a load that fails."""
    code = """
import sys, torch, modkit
model = torch.nn.Linear(1, 1)
modkit.load_state_dict(model, model.state_dict())
modkit.load_state_dict(model, {"weight": torch.ones(1, 1)}, strict=False)
print("modkit._mismatches" in sys.modules)
try:
    modkit.load_state_dict(model, {"stray": torch.ones(1)})
except RuntimeError:
    print("modkit._mismatches" in sys.modules)
"""

    assert python(code).stdout.split() == ["False", "True"]


@needs_notes
def test_a_fault_of_the_diagnosis_does_not_hide_the_error(monkeypatch):
    """Torch's error is raised without a note."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(_mismatches, "explain", fail)
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        Net().load_state_dict(prefixed("module.", Net()))

    assert not hasattr(caught.value, "__notes__")


@needs_notes
def test_names_that_a_hook_has_translated_are_no_cause():
    """Only what the load itself has reported is explained."""
    model = Net()

    def rename(module, state_dict, *_):
        for name in list(state_dict):
            state_dict[name.removeprefix("module.")] = state_dict.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    state = {**prefixed("module.", Net()), "module.body.weight": torch.ones(5, 4)}
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.weight") as caught:
        model.load_state_dict(state)

    assert not hasattr(caught.value, "__notes__")


_cycle = {"model": {}}
_cycle["model"]["model"] = _cycle


@for_each(
    "state",
    [
        {},
        {"text": "value", "none": None},
        {"w" * 70_000: torch.ones(1), ".".join("ab" * 35_000): torch.ones(1)},
        {"." * 70_000: torch.ones(4, 6), "a..b": torch.ones(1), "": torch.ones(1)},
        {f"{'1' * 5000}.weight": torch.ones(6, 4), "٣.weight": torch.ones(6, 4)},
        {"body.weight\x1b[2J\n": torch.ones(6, 4)},
        {"body.weight": torch.ones(3, 3).to_sparse()},
        {"module.body.weight": torch.ones(6, 4).to_mkldnn()},
        {"body.weight": torch.nn.Parameter(torch.empty(0))},
        _cycle,
    ],
    ids=lambda state: repr(list(state))[:40],
)
def test_odd_state_dicts(state):
    """Any content is torch's error; the lines below are short and printable."""
    with pytest.raises(RuntimeError, match="loading state_dict for Net") as caught:
        Net().load_state_dict(state)

    lines = getattr(caught.value, "__notes__", [])
    assert len(lines) <= 8
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


@for_each(
    "state",
    [
        {1: torch.ones(1), ("a",): {2: 3}},
        {1: {"weight": torch.ones(1)}},
        {None: None},
        {"x.weight": torch.nn.UninitializedParameter()},
    ],
)
def test_what_torch_raises_other_errors_for(state):
    """Keys that are not strings and parameters without a shape are ignored, or shown."""
    lines = _mismatches.explain({"weight": (1,)}, state)

    assert all(line.isprintable() for line in lines)


def test_fake_tensors_and_lazy_parameters():
    """Neither data nor missing shapes are read."""
    with FakeTensorMode():
        state = {f"module.{name}": torch.empty(shape) for name, shape in vit().items()}
    lazy = modkit.nn.Module()
    lazy.layer = modkit.nn.LazyLinear(3)

    assert "'module.'" in _mismatches.explain(vit(), state)[0]
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        lazy.load_state_dict(prefixed("module.layer.", torch.nn.Linear(2, 3)))
    assert not NOTES or "'module.'" in caught.value.__notes__[0]


@for_each("load", [Net.load_state_dict, modkit.load_state_dict], ids=["method", "function"])
def test_a_parameter_that_its_first_name_gives_a_shape(load):
    """With ``assign``, the second name of a module meets what its first name has assigned."""
    layer = modkit.nn.Module()
    layer.weight = torch.nn.UninitializedParameter()
    model = modkit.nn.Module()
    model.first = model.second = layer
    state = {"first.weight": torch.ones(2), "second.weight": torch.ones(3)}

    with pytest.raises(RuntimeError, match=r"size mismatch for second\.weight: .*\[3\].*\[2\]"):
        load(model, state, assign=True)


_fits = {"fc.weight": (4, 3)}


@for_each(
    ("model", "file", "line"),
    [
        (
            {"a.weight": (5, 2)},
            {"left.a.weight": (5, 2), "right.a.weight": (5, 2)},
            (
                "1 of 3 names of the checkpoint have the extra prefix 'left.' or 'right.'; which one, "
                "shapes do not tell"
            ),
        ),
        (
            {"left.a.weight": (5, 2), "right.a.weight": (5, 2)},
            {"a.weight": (5, 2)},
            (
                "1 of 2 names of the checkpoint lack the prefix 'left.' or 'right.'; which one, shapes "
                "do not tell"
            ),
        ),
        (
            {"a.weight": (5, 2), "b.weight": (6, 2)},
            {"left.a.weight": (5, 2), "right.a.weight": (5, 2), "right.b.weight": (6, 2)},
            (
                "2 of 4 names of the checkpoint have the extra prefix 'right.': remove it, or pass "
                "strip='right.' to modkit.load_matching()"
            ),
        ),
        ({}, {"x" * 80: (1,)}, f"only the checkpoint has 1 other tensor, in '{'x' * 80}'"),
        ({}, {"x" * 81: (1,)}, f"only the checkpoint has 1 other tensor, in '{'x' * 40}...'"),
    ],
)
def test_whole_lines(model, file, line):
    """The first line says what is on which side."""
    lines = _mismatches.compare(_fits | model, _fits | file)

    assert lines[0] == line


def test_at_most_eight_lines():
    """Each cause has a line; where there are more than eight, the last line counts the others."""
    families = {
        "q.lora_A": "an adapter such as LoRA",
        "q.SCB": "quantized weights",
        "n_averaged": "the counter of an AveragedModel",
        "bn.running_var": "statistics of BatchNorm; the other side has another norm such as "
        "GroupNorm, none, or track_running_stats=False",
        "q.weight_g": "weight_norm or spectral_norm",
        "q.weight_u": "spectral_norm or pruning",
        "parametrizations.q": "a parametrization such as weight_norm",
        "q._extra_state": "extra state, for instance of TransformerEngine",
        "inv_freq": "constants that some versions of a library save",
    }
    nine = dict.fromkeys(families, (2,))
    eight = dict.fromkeys([*families][:8], (2,))

    for side, model, file in (("checkpoint", {}, eight), ("model", eight, {})):
        assert _mismatches.compare(_fits | model, _fits | file) == [
            f"only the {side} has 1 tensor such as '{name}': {families[name]}" for name in eight
        ]
    *lines, last = _mismatches.compare(_fits, _fits | nine)
    assert len(lines) == 7
    assert last == "and 2 more differences"


def test_a_model_in_the_place_of_a_state_dict():
    """The note says which entry is a model."""
    lines = _mismatches.explain(vit(), {"epoch": 3, "model": Net()})

    assert lines == ["the entry 'model' is a whole model: load checkpoint['model'].state_dict()"]


def test_the_state_dict_of_a_single_layer():
    """Names without a dot have a prefix too much, or lack one, as others do."""
    layer = {"weight": (3, 4), "bias": (3,)}
    inside = {f"head.fc.{name}": shape for name, shape in layer.items()}

    assert "lack the prefix 'head.fc.'" in _mismatches.compare(inside, layer)[0]
    assert "have the extra prefix 'head.fc.'" in _mismatches.compare(layer, inside)[0]


def test_a_state_dict_below_several_keys():
    """The keys in front of it are named, up to four; a dict that holds itself does no harm."""
    nested = {"epoch": 1, "state": {"run": {"model": {"module": tensors(vit())}}}}
    nested["self"] = nested

    (line,) = _mismatches.explain(vit(), nested)

    assert line.endswith(
        "state dict is below a key of this checkpoint: load "
        "checkpoint['state']['run']['model']['module']"
    )


def test_another_dict_of_tensors_is_doubted():
    """One that has neither a name nor a shape of the model need not be its state dict."""
    random_state = {"epoch": 1, "random": {"cuda": torch.ones(816), "cpu": torch.ones(817)}}
    line, *_ = _mismatches.explain(vit(), random_state)
    same_shape, *_ = _mismatches.explain(
        {"weight": (4, 3)}, {**random_state, "net": {"kernel": torch.ones(4, 3)}}
    )

    assert line == "the state dict may be below a key of this checkpoint: load checkpoint['random']"
    assert same_shape == (
        "the state dict is below a key of this checkpoint: load checkpoint['net']"
    )


def test_names_that_fit_are_no_example_of_another_model():
    """The examples are names that only one side has."""
    stem = {"stem.weight": (4, 3), "stem.bias": (4,)}
    file = stem | {f"block{i}.{i}x.weight": (4, 4 + i) for i in range(40)}
    model = stem | {f"layers.{i}.y.weight": (5 + i, 4) for i in range(40)}

    line = _mismatches.explain(model, tensors(file))[0]

    assert line.startswith("hardly a name of the checkpoint fits")
    assert line.endswith(
        "It has 'block0.0x.weight', 'block1.1x.weight', ...; the model has 'layers.0.y.weight', "
        "'layers.1.y.weight', ..."
    )


def test_a_family_that_both_sides_have_is_no_cause():
    """The statistics and adapters of layers that one side alone has are due to the depth, not to another norm."""
    layer = {**batch_norm("bn", 4), "q.lora_A.weight": (2, 4)}
    deep, shallow = (
        {f"layer.{i}.{name}": shape for i in range(depth) for name, shape in layer.items()}
        for depth in (5, 2)
    )

    for model, file, entries in ((deep, shallow, "2 entries"), (shallow, deep, "5 entries")):
        (line,) = _mismatches.explain(model, tensors(file))

        assert line.startswith(f"another depth: 'layer' has {entries} in the checkpoint")


def test_lists_of_one_kind_have_one_line():
    """Another number of experts in every layer is one cause."""

    def experts(number, layers=12):
        homes = [f"layers.{i}.experts.{n}" for i in range(layers) for n in range(number)]
        return {f"{home}.{name}": (4, 4) for home in homes for name in ("gate", "up")}

    for layers, home in ((12, "layers.*.experts"), (1, "layers.0.experts")):
        (line,) = _mismatches.explain(experts(8, layers), tensors(experts(4, layers)))

        assert line.startswith(f"another depth: '{home}' has 4 entries in the checkpoint, 8")


def test_a_name_is_listed_once():
    """Tensors that one side alone has in every layer are named once."""
    model = {f"layers.{i}.w": (4, 4) for i in range(4)}
    file = model | {f"layers.{i}.scale": (i + 7,) for i in range(4)}

    assert _mismatches.explain(model, tensors(file)) == [
        "only the checkpoint has 4 other tensors, in 'layers.*': 'scale'"
    ]


def test_a_part_behind_a_prefix_and_another_home():
    """One beginning hides the next, and that a part; each is named."""
    renamed = {
        name.replace("blocks", "module.layers").replace("proj", "out"): shape
        for name, shape in vit().items()
    }
    lines = "\n".join(_mismatches.compare(vit(), renamed))

    assert "'module.layers' in the checkpoint is 'blocks' in the model" in lines
    assert "attn.out' in the checkpoint is 'blocks.*.attn.proj' in the model" in lines


def test_the_time_of_a_diagnosis():
    """A thousand names take a fraction of a second, whether they fit after a rename or not at all."""
    rng = random.Random(0)
    model = vit(depth=82)
    renamed = {name.replace("attn.proj", "attn.out"): shape for name, shape in model.items()}
    others = {f"{rng.random()}.x{rng.random()}.weight": (8, 8) for _ in range(1000)}
    start = time.process_time()
    first = _mismatches.compare(model, renamed)
    middle = time.process_time()
    second = _mismatches.compare(model, others)
    end = time.process_time()

    assert "attn.out'" in first[0]
    assert "another model" in second[0]
    # Ten times what is measured on an idle core.
    assert middle - start < 1
    assert end - middle < 10


def loads_silently(model, state):
    """Return True if a load that is not strict emits no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state, strict=False)
    return True


@for_each("load", [Net.load_state_dict, modkit.load_state_dict], ids=["method", "function"])
def test_a_load_in_vain_warns(load):
    """If no parameter was loaded, the warning says why, and points to the caller."""
    with pytest.warns(
        UserWarning, match=r"none of the 4 parameters of Net\nall 7 .*'module\.'"
    ) as w:
        load(Net(), prefixed("module.", Net()), strict=False)

    assert [each.filename for each in w] == [__file__]


def test_loads_that_are_not_in_vain():
    """No warning: one parameter, nothing given, buffers alone, no parameter, a hook that took it."""
    state = Net().state_dict()
    buffers = {name: tensor for name, tensor in state.items() if "running" in name}
    bare = modkit.nn.Module()
    taking = Net()
    taking.register_load_state_dict_pre_hook(lambda module, state_dict, *_: state_dict.clear())

    assert loads_silently(Net(), {"body.bias": state["body.bias"], "stray": torch.ones(1)})
    assert loads_silently(Net(), {})
    assert loads_silently(Net(), buffers)
    assert loads_silently(bare, {"stray": torch.ones(1)})
    assert loads_silently(taking, {"stray": torch.ones(1)})


def layered():
    """Make a model with a list of equal layers, so that shapes tell nothing."""
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(6))
    return torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 2), "layers": layers})


def renamed(pattern, replacement):
    """Rename all tensors of the layered model."""
    state = layered().state_dict()
    return {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}


INSIDE = {
    "compiled layers": (r"(layers\.\d)", r"\1._orig_mod"),
    "checkpointed layers": (r"(layers\.\d)", r"\1._checkpoint_wrapped_module"),
    "FSDP around all of it": (
        r"^(.*?\d)?",
        lambda m: f"_fsdp_wrapped_module.{m[0]}._orig_mod" if m[0] else "_fsdp_wrapped_module.",
    ),
    "DDP around a part": (r"^layers", "layers.module"),
    "compiled in DDP": ("^", "module._orig_mod."),
    "DDP in compiled": ("^", "_orig_mod.module."),
    "all of them": (r"^(\w+)", r"module._orig_mod.\1.module._fsdp_wrapped_module"),
    "a trainer around compiled layers": (r"^(embed|layers\.\d)", r"net.\1._orig_mod"),
    "a prefix": ("^", "student.encoder."),
    "a wrapper and a prefix": ("^", "module.encoder."),
}


def remedied(model, state, notes):
    """Do what notes propose, as a user would copy it, and return what was loaded."""
    text = "\n".join(notes)
    for code in re.findall(r"load (checkpoint\S+)", text):
        state = eval(code.rstrip(":,"), {"checkpoint": state})
    strips = [ast.literal_eval(code) for code in re.findall(r"strip=('.*?'|\[.*?\])", text)]
    prefixes = [p for strip in strips for p in ([strip] if isinstance(strip, str) else strip)]
    renames = [eval(code) for code in re.findall(r"rename=(lambda name: '.*?' \+ name)", text)]
    for strip in (prefixes, prefixes[::-1]):
        matched = modkit.load_matching(model, state, strip=strip, rename=(*renames, None)[0])
        assert (matched.missing, matched.skipped) == ([], {}), text


@needs_notes
@for_each("case", INSIDE)
def test_what_a_note_proposes_is_accepted(case):
    """Wrapper parts at any level and prefixes are named, with a remedy that works in any order."""
    state = renamed(*INSIDE[case])
    for given in (state, {"model": state}):
        model = layered()
        with pytest.raises(RuntimeError) as caught:
            modkit.load_state_dict(model, given)

        notes = caught.value.__notes__
        assert "another model" not in "\n".join(notes)
        for part in _mismatches.WRAPPERS:
            if any(part in name.split(".") for name in state):
                assert f"(added by {_mismatches.WRAPPERS[part]})" in "\n".join(notes)
        remedied(model, given, notes)


@needs_notes
def test_a_part_of_a_model_is_given_its_prefix():
    """The note shows the function that adds it."""
    model = torch.nn.ModuleDict({"backbone": layered()})
    with pytest.raises(RuntimeError) as caught:
        modkit.load_state_dict(model, layered().state_dict())

    assert "rename=lambda name: 'backbone.' + name" in caught.value.__notes__[0]
    remedied(model, layered().state_dict(), caught.value.__notes__)


def test_a_part_that_the_model_has_stays():
    """A child called ``module`` is not taken for a wrapper."""
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}

    assert modkit.load_matching(model, state, strip="module.").missing == []


@needs_notes
@for_each("kind", [modkit.EMA, modkit.EMACallback])
def test_the_state_of_averages_is_named(kind):
    """The note says what loads it, in place of a search for tensors inside."""
    model = Net()
    state = kind(model).state_dict()
    for load in (modkit.load_state_dict, modkit.load_matching):
        with pytest.raises((RuntimeError, modkit.errors.NameMismatchError)) as caught:
            load(model, state)

        (note,) = caught.value.__notes__
        assert "state of an EMA or EMACallback" in note
        assert "load_state_dict(), or load ema.averaged_model().state_dict()" in note
