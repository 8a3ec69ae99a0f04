import copy
import pickle
from typing import Any, Generic, TypeVar

import pydantic
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    validate_call,
)

from tests.suites.probes.user_files import imported


ANY = ConfigDict(arbitrary_types_allowed=True)


def _refusal(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValidationError as error:
        return [
            {**one, "input": repr(one["input"]), "ctx": repr(one.get("ctx"))}
            for one in error.errors(include_url=False)
        ]
    return "accepted"


def field(nn):
    class Config(BaseModel):
        model_config = ANY
        net: nn.Module
        lr: float = 0.1

    class Net(nn.Module):
        pass

    return (
        [
            Config(net=net).net
            for net in (nn.Linear(2, 2), torch.nn.ReLU(), Net(), torch.nn.Module())
        ],
        _refusal(Config, net=3),
        _refusal(Config, net=nn.Linear),
        repr(Config(net=Net())),
    )


def field_of_a_user_class(nn):
    with imported(nn) as users:

        class Config(BaseModel):
            model_config = ANY
            block: users.Block
            kind: type[nn.Module] = nn.ReLU

        return (
            Config(block=users.Wide(), kind=users.Wide),
            _refusal(Config, block=nn.Linear(2, 2)),
            _refusal(Config, block=users.Block(), kind=int),
        )


def copies(nn):
    with imported(nn) as users:

        class Config(BaseModel):
            model_config = ANY
            net: Any

        config = Config(net=users.Net(users.Block()))
        deep, shallow = config.model_copy(deep=True), config.model_copy()
        x = torch.ones(1, 4)
        return (
            deep.net(x),
            shallow.net is config.net,
            copy.deepcopy(config).net(x),
            deep.net is config.net,
        )


def without_arbitrary_types(nn):
    try:

        class Config(BaseModel):
            net: nn.Module

    except pydantic.PydanticSchemaGenerationError as error:
        return str(error).replace("modkit.nn.Module", "torch.nn.modules.module.Module")
    return Config


def validated_method(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        @validate_call(config=ANY)
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return x * self.weight * times

    net = Net()
    return (
        net(torch.ones(2), times="2"),
        _refusal(net, 3),
        torch.compile(net, backend="eager")(torch.ones(2)),
    )


def generic(nn):
    T = TypeVar("T", bound=nn.Module)

    class Config(BaseModel, Generic[T]):
        model_config = ANY
        net: T

    return (
        Config[nn.Linear](net=nn.Linear(2, 2)).net,
        _refusal(Config[nn.Linear], net=nn.ReLU()),
        Config(net=torch.nn.ReLU()).net,
        _refusal(Config, net=1),
    )


def dataclass_of_a_module(nn):
    @pydantic.dataclasses.dataclass(config=ANY, eq=False)
    class Net(nn.Module):
        width: int
        activation: nn.Module | None = None

        def __post_init__(self):
            nn.Module.__init__(self)
            self.linear = nn.Linear(self.width, self.width)

        def forward(self, x):
            return self.linear(x)

    return Net("3")(torch.ones(1, 3)), _refusal(Net, "a"), [*Net("3").state_dict()]


def custom_schema(nn):
    class Net(nn.Module):
        def __init__(self, width=2):
            super().__init__()
            self.linear = nn.Linear(width, width)

        @classmethod
        def __get_pydantic_core_schema__(cls, source, handler):
            return _core(cls)

    class Config(BaseModel):
        net: Net

    return Config(net=3).net, Config(net=Net(1)).net, _refusal(Config, net="a")


def _core(cls):
    from pydantic_core import core_schema

    made = core_schema.no_info_after_validator_function(cls, core_schema.int_schema())
    return core_schema.union_schema([core_schema.is_instance_schema(cls), made])


def pickled(nn):
    with imported(nn, PICKLED) as users:
        config = pickle.loads(pickle.dumps(users.Config(net=users.Net())))
        return config.net(torch.ones(2)), repr(config)


PICKLED = """
import pydantic
import {nn} as nn


class Net(nn.Module):
    def forward(self, x):
        return x * 2


class Config(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    net: nn.Module
"""
