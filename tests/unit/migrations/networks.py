"""Attention blocks of three versions, as plain classes and as one class that declares migrations."""

import torch

from modkit import migrations as mig


def equal(first, second):
    """Return True if two dicts have the same names and bitwise identical tensors."""
    return first.keys() == second.keys() and all(
        first[name].dtype == value.dtype and torch.equal(first[name], value)
        for name, value in second.items()
    )


def versions(state_dict):
    """Return the versions of a state dict by module."""
    return {path: own["version"] for path, own in state_dict._metadata.items()}


def network(nn, attention):
    """Build a network of two blocks and a head."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(attention() for _ in range(2))
            self.head = torch.nn.Linear(4, 2)

    return Network()


def old_attention(nn):
    """Return the class as it was in version 1."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q", "k", "v", "out"):
                setattr(self, name, torch.nn.Linear(4, 4))
            self.register_buffer("masked_bias", torch.tensor(-1e4))

    return Attention


def middle_attention(nn):
    """Return the class as it was in version 2."""

    class Attention(nn.Module):
        _version = 2

        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(4, 12)
            self.proj = torch.nn.Linear(4, 4)
            self.register_buffer("masked_bias", torch.tensor(-1e4))

    return Attention


def new_attention(nn):
    """Return the class of version 3, which declares its migrations."""

    @mig.declare(
        {
            2: [mig.merge(["q.*", "k.*", "v.*"], "qkv.*"), mig.rename("out.**", "proj.**")],
            3: [
                mig.drop("masked_bias", torch.tensor(-1e4)),
                mig.add("scale", lambda module: torch.ones(module.heads)),
            ],
        }
    )
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = 2
            self.scale = torch.nn.Parameter(torch.rand(2))
            self.qkv = torch.nn.Linear(4, 12)
            self.proj = torch.nn.Linear(4, 4)

    return Attention


def joined(state_dict):
    """Return the values that version 3 has for a state dict of version 1."""
    result = {}
    for block in ("blocks.0", "blocks.1"):
        result[f"{block}.scale"] = torch.ones(2)
        for end in ("weight", "bias"):
            parts = [state_dict[f"{block}.{part}.{end}"] for part in "qkv"]
            result[f"{block}.qkv.{end}"] = torch.cat(parts)
        for end in ("weight", "bias"):
            result[f"{block}.proj.{end}"] = state_dict[f"{block}.out.{end}"]
    return result | {name: state_dict[name] for name in ("head.weight", "head.bias")}
