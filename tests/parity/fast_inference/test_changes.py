from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.fast_inference.changes import ATTRIBUTES, CONVERSION, STRUCTURE, WEIGHTS, make
from tests.parity.fast_inference.nets import batch, net, run
from tests.parity.fast_inference.twins import differing_keys, left_behind, outcome
from tests.parity.module.module_cases import seed


CHANGES = {
    f"{kind}: {name}": change
    for kind, changes in {
        "structure": STRUCTURE,
        "attributes": ATTRIBUTES,
        "conversion": CONVERSION,
        "weights": WEIGHTS,
    }.items()
    for name, change in changes.items()
}


def changed(scope, impl, change, between, mode):
    """Change a network in a scope, and call it before, after and once the scope is left."""
    seen = {}
    model = net(impl)
    with scope(model):
        if between:
            seen["before"] = run(model, mode)
        seed()
        seen["change"] = outcome(lambda: make(model, change))
        seen["first call"] = run(model, mode)
        seen["other shape"] = run(model, mode, batch(1))
        seen["double"] = run(model, mode, batch().double())
        seen["repr"] = outcome(lambda: repr(model))
        seen["keys"] = list(model.state_dict())
        seen["second call"] = run(model, mode)
    seen["after the scope"] = run(model, mode)
    seen["members"] = left_behind(model)
    return seen


@for_each("change", CHANGES.values(), ids=CHANGES.keys())
def test_change(change):
    """A change made inside is seen by the next call, and persists as it does in plain code."""
    differing = []
    cases = ((TORCH, False, "inference_mode"), (MODKIT, True, "grad"))
    for impl, between, mode in cases:
        found = differing_keys(lambda scope: changed(scope, impl, change, between, mode))
        differing += [(impl.name, between, mode, key) for key in found]

    assert differing == []


@for_each("change", CHANGES.values(), ids=CHANGES.keys())
def test_change_of_a_part_in_scope(change):
    """A change is seen where the scope is entered for parts of the network alone."""

    def scenario(scope):
        seen = {}
        model = net(TORCH)
        with scope(model.stem), scope(model.blocks[0]), scope(model.head[1]):
            seen["before"] = run(model, "no_grad")
            seed()
            seen["change"] = outcome(lambda: make(model, change))
            seen["after the change"] = run(model, "no_grad")
        seen["after the scope"] = run(model, "no_grad")
        seen["members"] = left_behind(model)
        return seen

    assert differing_keys(scenario) == []


@for_each("change", CHANGES.values(), ids=CHANGES.keys())
def test_two_changes_in_one_scope(change):
    """A change made to a network that was changed and called before is seen."""

    def scenario(scope):
        seen = {}
        model = net(MODKIT)
        with scope(model):
            for name in ("setattr", "append"):
                make(model, STRUCTURE[name])
            seen["before"] = run(model, "no_grad")
            seed()
            seen["change"] = outcome(lambda: make(model, change))
            seen["after the change"] = run(model, "no_grad")
            seed()
            seen["change again"] = outcome(lambda: make(model, change))
            seen["after the second change"] = run(model, "no_grad")
        seen["members"] = left_behind(model)
        return seen

    assert differing_keys(scenario) == []
