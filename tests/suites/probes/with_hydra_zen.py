import functools
import inspect

import hydra
import hydra_zen
import torch
from hydra.errors import InstantiationException
from hydra_zen import (
    builds,
    get_target,
    hydrated_dataclass,
    instantiate,
    just,
    make_config,
    make_custom_builds_fn,
    store,
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


def layers(nn):
    kinds = (nn.Linear, nn.Conv2d, nn.TransformerEncoderLayer, nn.LSTM)
    return [_yaml(builds(kind, populate_full_signature=True)) for kind in kinds]


def partial(nn):
    with imported(nn) as users:
        made = instantiate(builds(users.Wide, zen_partial=True, extra=3))
        return (
            isinstance(made, functools.partial),
            made(4)(torch.ones(1, 4)),
            _yaml(just(users.Block)),
        )


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


def custom_builds(nn):
    with imported(nn) as users:
        full = make_custom_builds_fn(populate_full_signature=True, zen_convert={"dataclass": False})
        config = full(users.Block)
        return [*inspect.signature(config).parameters.values()], instantiate(config(width=2))


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


def wrapped(nn):
    with imported(nn) as users:
        config = builds(users.Block, 4, zen_wrappers=torch.compile, zen_meta={"note": "a"})
        return _yaml(config)


def of_an_instance(nn):
    with imported(nn) as users:
        try:
            return _yaml(make_config(net=users.Block()))
        except hydra_zen.errors.HydraZenUnsupportedPrimitiveError as error:
            return str(error)


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


def hydra_shows_an_error(nn):
    with imported(nn):
        try:
            hydra.utils.instantiate({"_target_": "users_networks.Block", "width": "a"})
        except InstantiationException as error:
            return str(error)


def optimizer_of_parameters(nn):
    with imported(nn) as users:
        net = users.Block()
        optimizer = instantiate(builds(torch.optim.SGD, lr=0.1, zen_partial=True))(net.parameters())
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return net.state_dict(), optimizer.state_dict()


def task_function(nn):
    with imported(nn) as users:

        @zen
        def task(net: nn.Module, lr: float):
            return net(torch.ones(1, 4)), lr

        return task(make_config(net=builds(users.Block), lr=0.1)), inspect.signature(
            task.func
        ).parameters["net"].name


def config_store(nn):
    with imported(nn) as users:
        configs = store(group="net", name="block")
        own = hydra_zen.ZenStore(deferred_hydra_store=True)
        own(users.Block, scale=2.0, name="block", group="net")
        return _yaml(own["net", "block"]), type(configs).__name__
