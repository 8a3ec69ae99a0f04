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


def test_a_prefix_of_a_small_model():
    """A file of many other tensors does not speak against it."""
    new = {f"{name}.weight": (i + 2, 2) for i, name in enumerate("abc")}
    old = {f"m.{name}": shape for name, shape in new.items()} | {f"x{i}": (9,) for i in range(40)}

    assert find_renames(old, new).rules == [Rule("prefix", ("m.",), ("",), 3)]
    assert find_renames(new, old).rules == [Rule("prefix", ("",), ("m.",), 3)]


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


def test_names_that_are_too_long_are_left_out():
    """A name may be longer than the path of any attribute."""
    longest = "x" * 1000

    assert find_renames({longest: (1,), f"{longest}x": (1,)}, {}).old == {longest: (1,)}


@for_each(
    ("old", "new", "is_renamed"),
    [
        ({"a.b.weight": (4, 4)}, {"a.c.weight": (4, 4)}, True),
        ({"a.b.weight": (4, 4)}, {"c.b.weight": (4, 4)}, True),
        ({"pos": (1, 5, 4)}, {"position": (1, 5, 4)}, True),
        ({"a.weight": (4,), "a.bias": (4,)}, {"b.weight": (4,), "b.bias": (4,)}, True),
        ({"a.weight": (4, 4), "a.bias": (4,)}, {"b.weight": (4, 4)}, True),
        # Another shape, a name that fits, two parts, a number, one vector.
        ({"a.b.weight": (4, 4)}, {"a.c.weight": (4, 5)}, False),
        ({"a.weight": (4, 4)}, {"b.weight": (4, 4), "a.weight": (4, 4)}, False),
        ({"a.b.weight": (4, 4)}, {"c.d.weight": (4, 4)}, False),
        ({"a.0.weight": (4, 4)}, {"a.1.weight": (4, 4)}, False),
        ({"a.weight": (1, 4)}, {"b.weight": (1, 4)}, False),
        # Several readings on either side.
        ({"a.b.weight": (4, 4)}, {"a.c.weight": (4, 4), "a.d.weight": (4, 4)}, False),
        ({"a.b.weight": (4, 4)}, {"a.c.weight": (4, 4), "d.b.weight": (4, 4)}, False),
    ],
)
def test_one_part_of_a_name(old, new, is_renamed):
    """A module, or a tensor, is renamed if its name differs in one part from one other name alone."""
    pairs = dict(zip(old, new, strict=False)) if is_renamed else {}

    assert find_renames(old, new).pairs == pairs
    assert find_renames(new, old).pairs == {new: old for old, new in pairs.items()}


def test_the_time_of_many_readings():
    """Names that could all be one another are left alone, in linear time."""
    old = {f"a{i}.weight": (4, 4) for i in range(20_000)}
    new = {f"b{i}.weight": (4, 4) for i in range(20_000)}

    assert find_renames(old, new).pairs == {}
