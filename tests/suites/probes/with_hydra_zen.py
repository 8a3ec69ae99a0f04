import inspect

import hydra
import torch
from hydra_zen import (
    builds,
    get_target,
    hydrated_dataclass,
    instantiate,
    make_config,
    to_yaml,
    zen,
)
from omegaconf import OmegaConf

from tests.suites.probes.user_files import imported


def _yaml(config):
    """Return a configuration with the names of one library."""
    return to_yaml(config).replace("modkit.nn.Module", "torch.nn.modules.module.Module")


def user_class(nn):
    with imported(nn) as users:
        config = builds(users.Wide, width=4, populate_full_signature=True)
        return (
            _yaml(config),
            instantiate(config)(torch.ones(1, 4)),
            get_target(config),
            instantiate(config, extra=3),
        )


def nested(nn):
    with imported(nn) as users:
        config = builds(
            users.Net,
            body=builds(nn.Linear, 4, 4),
            head=builds(users.Wide, width=4),
            depth=1,
        )
        return _yaml(config), instantiate(config)(torch.ones(1, 4)), instantiate(config)


def class_as_an_argument(nn):
    with imported(nn) as users:
        config = builds(dict, kind=users.Wide, base=nn.Module, layer=nn.ReLU)
        made = instantiate(config)
        return (
            _yaml(config),
            made["kind"],
            issubclass(users.Wide, made["base"]),
            issubclass(nn.ReLU, made["base"]),
        )


def signature_is_validated(nn):
    with imported(nn) as users:
        try:
            builds(users.Block, depth=3)
        except TypeError as error:
            return str(error)
        return inspect.signature(users.Block)


def hydrated(nn):
    with imported(nn) as users:

        @hydrated_dataclass(users.Block)
        class Config:
            width: int = 3
            scale: float = 2.0

        return instantiate(Config)(torch.ones(1, 3)), _yaml(Config(width=1))


def inherited(nn):
    with imported(nn) as users:
        base = builds(users.Block, width=4, populate_full_signature=True)
        return _yaml(builds(users.Wide, extra=1, builds_bases=(base,)))


def hydra_targets(nn):
    with imported(nn):
        config = OmegaConf.create(
            {
                "_target_": "users_networks.Net",
                "body": {"_target_": f"{nn.__name__}.Linear", "in_features": 4, "out_features": 4},
                "head": {"_target_": "torch.nn.Linear", "_args_": [4, 3]},
            }
        )
        return hydra.utils.instantiate(config)(torch.ones(1, 4))


def hydra_looks_up_the_base(nn):
    found = hydra.utils.get_class(f"{nn.__name__}.Module")
    own = hydra.utils.get_class(f"{nn.Module.__module__}.{nn.Module.__qualname__}")
    return (
        found is nn.Module,
        own is nn.Module,
        hydra.utils.get_object(f"{nn.__name__}.functional.relu"),
    )


def task_function(nn):
    with imported(nn) as users:

        @zen
        def task(net: nn.Module, lr: float):
            return net(torch.ones(1, 4)), lr

        return task(make_config(net=builds(users.Block), lr=0.1)), inspect.signature(
            task.func
        ).parameters["net"].name
