import contextlib
import io

import torch
from jsonargparse import (
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    class_from_function,
)

from tests.suites.probes.user_files import imported


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
