"""``find_renames``: on both sides of each threshold."""

from modkit._renames import Rule, find_renames
from tests.cases import for_each


@for_each(("fitting", "is_renamed"), [(1, False), (2, True)])
def test_half_of_the_shapes_fit(fitting, is_renamed):
    """Another beginning is certain if half of the tensors behind it have the same shape."""
    old = {f"net.{name}.weight": (i + 2, 2) for i, name in enumerate("abcd")}
    new = {f"body.{name}.weight": (i + 2, 2 if i < fitting else 9) for i, name in enumerate("abcd")}

    assert (Rule("rename", ("net",), ("body",), 4) in find_renames(old, new).rules) == is_renamed


@for_each(("others", "is_prefix"), [(3, True), (4, False)])
def test_a_prefix_of_a_quarter_of_the_names(others, is_prefix):
    """A prefix of fewer names is a coincidence."""
    names = [f"{i}{'x' * i}" for i in range(others)]
    old = {"m.a.weight": (2, 2)} | {f"{name}old": (5,) for name in names}
    new = {"a.weight": (2, 2)} | {f"{name}new": (7,) for name in names}

    assert (Rule("prefix", ("m.",), ("",), 1) in find_renames(old, new).rules) == is_prefix


@for_each(("prefixed", "is_prefix"), [(6, True), (5, False)])
def test_a_prefix_where_no_shape_fits(prefixed, is_prefix):
    """It is one of three quarters of the names, since the model may have another width."""
    old = {f"m.{i}.weight": (2, 2) for i in range(prefixed)}
    old |= {f"old{i}": (5,) for i in range(8 - prefixed)}
    new = {f"{i}.weight": (3, 3) for i in range(prefixed)}

    assert (Rule("prefix", ("m.",), ("",), prefixed) in find_renames(old, new).rules) == is_prefix


@for_each("dots", [".", ".."])
@for_each("names", [("0.weight", "0.bias"), ("body.weight", "head.weight", "scale")])
def test_a_prefix_of_dots(dots, names):
    """``name.replace("module", "")`` leaves the dot; ``.0`` is not an entry of the list ``0``."""
    old = {dots + name: (i + 2,) for i, name in enumerate(names)}
    new = {name: (i + 2,) for i, name in enumerate(names)}

    assert find_renames(old, new).rules == [Rule("prefix", (dots,), ("",), len(names))]
    assert find_renames(new, old).rules == [Rule("prefix", ("",), (dots,), len(names))]


def test_a_name_that_ends_with_a_dot():
    """It is a tensor, and not one of a module that has a tensor without a name."""
    old = {"fc.": (2, 2), "norm.weight": (3,)}
    new = {"out.": (2, 2), "norm.weight": (3,)}

    assert find_renames(old, new).pairs == {"fc.": "out."}


@for_each(("outputs", "is_certain"), [(16, True), (20, False)])
def test_a_number_in_a_list_that_is_out_of_order(outputs, is_certain):
    """Where a name that both sides have is another layer, no number says which layer is which."""
    old = {"net.0.weight": (8, 8), "net.1.weight": (8, 8), "net.3.weight": (16, 8)}
    new = {"net.0.weight": (8, 8), "net.2.weight": (8, 8), "net.3.weight": (outputs, 8)}
    expected = {"net.1.weight": "net.2.weight"} if is_certain else {}

    assert find_renames(old, new).pairs == expected


@for_each(("shape", "is_certain"), [((9, 9), True), ((8, 8), False)])
def test_a_shape_that_one_side_has_twice(shape, is_certain):
    """It makes no rename certain, since the tensor may be the other one of that shape."""
    old = {"a.b": (8, 8), "fc.weight": (9, 9)}
    new = {"x.c": (8, 8), "fc.weight": shape}
    expected = {"a.b": "x.c"} if is_certain else {}

    assert find_renames(old, new).pairs == expected
    assert find_renames(new, old).pairs == {new: old for old, new in expected.items()}


@for_each(("number", "coverage"), [(1_000, 1.0), (1_001, 0.0)])
def test_shapes_of_many_names_are_not_compared(number, coverage):
    """It would take long; nothing is explained then."""
    old = {f"x{i}.weight": (i + 1, 2) for i in range(number)}

    assert find_renames(old, {"y.weight": (5, 2)}).coverage == coverage


def test_names_that_are_too_long_are_left_out():
    """A name may be longer than the path of any attribute."""
    longest = "x" * 1000

    assert find_renames({longest: (1,), f"{longest}x": (1,)}, {}).old == {longest: (1,)}


@for_each(("others", "is_joined"), [(61, True), (62, False)])
def test_tensors_of_many_in_one_module_are_not_joined(others, is_joined):
    """The first 64 tensors of a module are considered: all of thousands would take minutes."""
    old = {f"attn.{'x' * i}y.weight": (12, 8) for i in range(others)}
    old |= {f"attn.{name}.weight": (4, 8) for name in "qkv"}
    rules = find_renames(old, {"attn.qkv.weight": (12, 8)}).rules

    assert [rule.kind for rule in rules] == ["join"] * is_joined
