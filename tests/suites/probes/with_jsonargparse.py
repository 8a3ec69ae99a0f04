import contextlib
import io
from dataclasses import dataclass

import torch
from jsonargparse import (
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    Namespace,
    auto_cli,
    class_from_function,
)

from tests.suites.probes.user_files import NETWORKS, imported


# The class that jsonargparse makes becomes an attribute of the file.
LAZY = f"""{NETWORKS}

from jsonargparse import lazy_instance


def lazy():
    return lazy_instance(Block, width=2)
"""


def _refusal(parser, *line):
    """Return what is printed when a command line is refused."""
    try:
        parser.parse_args(list(line))
    except ArgumentError as error:
        return _names(str(error))
    return "accepted"


def _names(text):
    return text.replace("modkit.nn.Module", "torch.nn.modules.module.Module").replace(
        "modkit.nn", "torch.nn"
    )


def _parser(nn, **options):
    parser = ArgumentParser(exit_on_error=False, prog="train")
    parser.add_argument("--net", type=nn.Module, **options)
    parser.add_argument("--cfg", action=ActionConfigFile)
    return parser


def user_class_path(nn):
    with imported(nn):
        parser = _parser(nn)
        config = parser.parse_args(["--net=users_networks.Wide", "--net.width=4", "--net.extra=3"])
        return parser.dump(config), parser.instantiate(config).net(torch.ones(1, 4))


def layer_class_path(nn):
    parser = _parser(nn)
    config = parser.parse_args(
        ["--net=torch.nn.Linear", "--net.in_features=2", "--net.out_features=3"]
    )
    return parser.dump(config), parser.instantiate(config).net


def layer_of_the_library(nn):
    parser = _parser(nn)
    config = parser.parse_args(
        [f"--net={nn.__name__}.Linear", "--net.in_features=2", "--net.out_features=3"]
    )
    return parser.instantiate(config).net


def nested(nn):
    with imported(nn):
        parser = _parser(nn)
        config = parser.parse_args(
            [
                *(
                    "--net=users_networks.Net",
                    "--net.body=users_networks.Wide",
                    "--net.body.extra=4",
                ),
                *("--net.body.width=4", "--net.head=torch.nn.ReLU", "--net.depth=1"),
            ]
        )
        return parser.dump(config), parser.instantiate(config).net(torch.ones(1, 4))


def short_name_of_a_user_class(nn):
    # Classes of other probes may still be in memory, and their names be taken.
    with imported(nn, NETWORKS.replace("Wide", "Widest").replace("Block", "Scaled")):
        parser = _parser(nn)
        config = parser.parse_args(["--net=Widest", "--net.width=4"])
        return parser.dump(config), parser.instantiate(config).net


def short_name_of_a_layer(nn):
    parser = _parser(nn)
    config = parser.parse_args(["--net=RReLU", "--net.upper=0.5"])
    return parser.dump(config), parser.instantiate(config).net


def refused(nn):
    with imported(nn):
        parser = _parser(nn)
        return (
            _refusal(parser, "--net=torch.Tensor"),
            _refusal(parser, "--net=users_networks.Block", "--net.width=a"),
            _refusal(parser, "--net=users_networks.Block", "--net.depth=1"),
        )


def help_of_a_class(nn):
    with imported(nn):
        parser, printed = _parser(nn), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parser.parse_args(["--net.help=users_networks.Block"])
        return _names(printed.getvalue())


def subclass_arguments(nn):
    with imported(nn) as users:
        parser = ArgumentParser(exit_on_error=False, prog="train")
        parser.add_subclass_arguments(users.Block, "block", skip={"scale"})
        parser.add_subclass_arguments((nn.Module, torch.optim.Optimizer), "either")
        config = parser.parse_args(["--block=users_networks.Wide", "--either=torch.nn.ReLU"])
        return parser.dump(config), [*vars(parser.instantiate(config)).values()]


def class_arguments(nn):
    with imported(nn) as users:
        parser = ArgumentParser(exit_on_error=False, prog="train")
        parser.add_class_arguments(users.Wide, "net")
        config = parser.parse_args(["--net.width=4", "--net.scale=0.5"])
        return parser.dump(config), parser.instantiate(config).net, _names(parser.format_help())


def signature_of_a_layer(nn):
    parser = ArgumentParser(exit_on_error=False, prog="train")
    parser.add_class_arguments(nn.Conv2d, "conv")
    parser.add_class_arguments(nn.TransformerEncoderLayer, "layer")
    return parser.format_help()


def cli_of_a_class(nn):
    with imported(nn) as users:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            auto_cli(users.Block, args=["--help"], fail_untyped=False)
        return _names(printed.getvalue())


def cli_calls_a_method(nn):
    with imported(nn) as users:
        return auto_cli(users.Block, args=["--width=4", "extra_repr"], fail_untyped=False)


def cli_of_a_function(nn):
    with imported(nn):

        def train(net: nn.Module, steps: int = 1):
            return net(torch.ones(1, 8)), steps

        return auto_cli(train, args=["users_networks.Wide", "--steps=2"])


def configuration_file(nn):
    with imported(nn, LAZY) as users:
        parser = _parser(nn, default=users.lazy())
        config = parser.parse_string(
            "net: {class_path: users_networks.Wide, init_args: {width: 4}}"
        )
        return (
            parser.dump(config),
            parser.dump(parser.get_defaults()),
            parser.instantiate(config).net(torch.ones(1, 4)),
            parser.instantiate(parser.get_defaults()).net,
        )


def class_of_a_function(nn):
    with imported(nn) as users:

        def wide(width: int = 3) -> users.Block:
            return users.Wide(width)

        # The class becomes an attribute of this file.
        made = class_from_function(wide, name=f"Wide_{nn.__name__.partition('.')[0]}")
        return issubclass(made, users.Block), made(4)


def callable_type(nn):
    from collections.abc import Callable

    with imported(nn):
        parser = ArgumentParser(exit_on_error=False, prog="train")
        parser.add_argument("--make", type=Callable[[int], nn.Module])
        config = parser.parse_args(["--make=users_networks.Wide", "--make.extra=3"])
        return parser.instantiate(config).make(4)


def dataclass_with_a_module(nn):
    with imported(nn):

        @dataclass
        class Config:
            net: nn.Module
            others: list[nn.Module] | None = None
            lr: float = 0.1

        parser = ArgumentParser(exit_on_error=False, prog="train")
        parser.add_argument("--train", type=Config)
        line = ["--train.net=users_networks.Block", "--train.others+=torch.nn.ReLU", "--train.lr=1"]
        config = parser.parse_args(line)
        return parser.dump(config), repr(parser.instantiate(config).train)


def instance_is_accepted(nn):
    with imported(nn) as users:
        parser = _parser(nn)
        net = users.Block()
        return parser.parse_object(Namespace(net=net)).net is net
