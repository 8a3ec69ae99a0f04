from collections.abc import Iterator

import pytest
import torch

from tests.helpers import Implementation, freeze


def dropping_net(impl: Implementation) -> torch.nn.Module:
    """Build a network in training mode whose dropout and inner normalization are frozen."""
    model = impl.own.Sequential(
        impl.own.Dropout(0.5), impl.own.BatchNorm1d(2), impl.own.BatchNorm1d(2)
    )
    model(torch.randn(8, 2))
    model[0].eval()
    model[2].eval()
    return model


def everything(model: torch.nn.Module) -> object:
    """Freeze all that a pass over data may change."""
    return [
        (module.training, getattr(module, "momentum", None), freeze(dict(module.state_dict())))
        for module in model.modules()
    ]


def failing(error: type[BaseException]) -> Iterator[torch.Tensor]:
    """Yield a batch, and fail."""
    yield torch.randn(8, 2)
    raise error


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_every_module_as_it_was(impl, error: type[BaseException]) -> None:
    """If the loader fails, or a batch is refused, statistics, modes, momenta and hooks are as before."""
    model = dropping_net(impl)
    before = everything(model)
    refused = [torch.randn(8, 2), torch.randn(8, 3)]
    with pytest.raises(error):
        impl.update_bn(refused if error is RuntimeError else failing(error), model)

    assert everything(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_empty_loader_is_an_error(impl: Implementation) -> None:
    """Without any batch the statistics stay, and an error tells why."""
    model = dropping_net(impl)
    before = everything(model)
    with pytest.raises(ValueError, match="the loader is empty"):
        impl.update_bn([], model)

    assert everything(model) == before


def test_only_normalization_runs_in_training_mode(impl: Implementation) -> None:
    """Dropout is off in the pass, so the statistics are those of the data alone."""
    model = impl.own.Sequential(impl.own.Dropout(0.9), impl.own.BatchNorm1d(2)).train()
    data = torch.randn(64, 2) + 3
    impl.update_bn([data], model)

    torch.testing.assert_close(model[1].running_mean, data.mean(0))
    torch.testing.assert_close(model[1].running_var, data.var(0))


def test_every_module_gets_its_own_mode_back(impl: Implementation) -> None:
    """Layers that are frozen in a training model are frozen afterwards."""
    model = dropping_net(impl)
    impl.update_bn([torch.randn(8, 2)], model)

    assert [module.training for module in model.modules()] == [True, False, True, False]
