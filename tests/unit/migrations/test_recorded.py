"""``assert_recorded``: a golden file of names, shapes, dtypes and versions."""

import json

import pytest
import torch

from modkit import migrations as mig


nn = torch.nn


def test_a_class_over_three_versions(tmp_path):
    """Each new version fails once, while it is recorded; older ones are tested from then on."""
    path = tmp_path / "net.json"

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

    second = {2: [mig.rename("fc.*", "head.*")]}

    @mig.declare(second)
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 1)

    @mig.declare({**second, 3: [mig.convert("head.weight", torch.t)]})
    class Third(Second.__mro__[1]):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)
            self.head.bias = nn.Parameter(torch.zeros(1))

    for cls in (First, Second, Third):
        with pytest.raises(
            AssertionError, match=f"versions of {cls.__name__} are recorded; commit"
        ):
            mig.assert_recorded(cls(), path)
        before = path.read_bytes()
        mig.assert_recorded(cls(), path)
        assert path.read_bytes() == before

    assert json.loads(path.read_text())[0] == {
        "versions": {"": 1, "fc": 1},
        "tensors": {"fc.bias": ["float32", [1]], "fc.weight": ["float32", [1, 2]]},
    }
    assert len(json.loads(path.read_text())) == 3


def test_a_change_without_a_version(tmp_path):
    """Names, shapes and dtypes may not change while the versions stay."""
    path = tmp_path / "net.json"
    with pytest.raises(AssertionError, match="commit the file"):
        mig.assert_recorded(nn.Linear(2, 1), path)
    before = path.read_bytes()

    for model, text in (
        (
            nn.Linear(3, 1),
            r"weight was \['float32', \[1, 2\]\] and is \['float32', \[1, 3\]\], and no",
        ),
        (
            nn.Linear(2, 1, bias=False),
            r"bias was \['float32', \[1\]\] and is absent, and no version",
        ),
        (nn.Linear(2, 1).double(), r"bias was \['float32', \[1\]\] and is \['float64', \[1\]\]"),
    ):
        with pytest.raises(AssertionError, match=text):
            mig.assert_recorded(model, path)
    assert path.read_bytes() == before


def test_a_recorded_state_dict_that_no_longer_migrates(tmp_path):
    """A recorded state dict that becomes another one, or cannot migrate, fails; nothing is recorded."""
    path = tmp_path / "net.json"
    record = {"versions": {"": 1}, "tensors": {"a": ["float32", [2]], "b": ["float16", [2]]}}
    path.write_text(json.dumps([record]))

    for steps, text in (
        ([mig.rename("a", "c")], r"does not migrate: b was \['float16', \[2\]\] and is absent"),
        ([mig.merge(["a", "b"], "c")], "state dict 1 of 1: .*several dtypes"),
    ):

        @mig.declare({2: steps})
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.c = nn.Parameter(torch.zeros(2))

        with pytest.raises(AssertionError, match=text):
            mig.assert_recorded(Net(), path)
    assert json.loads(path.read_text()) == [record]


def test_other_files(tmp_path):
    """A file that this function did not write is not overwritten."""
    path = tmp_path / "net.json"
    for text in (
        "{",
        "5",
        "{}",
        '""',
        '{"a": 1}',
        '[{"versions": {}}]',
        '[{"versions": {}, "tensors": {"a": 1}}]',
    ):
        path.write_text(text)

        with pytest.raises(ValueError, match=r"was not written by assert_recorded\(\)"):
            mig.assert_recorded(nn.Linear(2, 1), path)
        assert path.read_text() == text
