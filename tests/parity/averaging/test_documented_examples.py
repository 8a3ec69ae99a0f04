import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import Implementation, same


def parts(impl: Implementation):
    """Return what the documented examples start from: loader, optimizer, model and loss."""
    torch.manual_seed(0)
    model = impl.nn.Sequential(
        impl.nn.Linear(3, 8), impl.nn.BatchNorm1d(8), impl.nn.ReLU(), impl.nn.Linear(8, 1)
    )
    inputs = torch.randn(32, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loader, optimizer, model, impl.nn.MSELoss()


def train_one_epoch(loader, optimizer, model, loss_fn, losses: list[float]) -> None:
    """Run the inner loop of the examples."""
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def test_stochastic_weight_averaging() -> None:
    """Train with a schedule, average from an epoch on, renew the statistics: all bits equal."""

    def scenario(impl: Implementation):
        loader, optimizer, model, loss_fn = parts(impl)
        swa_model = impl.AveragedModel(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        swa_start = 7
        swa_scheduler = impl.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        losses, rates = [], []
        for i in range(12):
            train_one_epoch(loader, optimizer, model, loss_fn, losses)
            if i > swa_start:
                swa_model.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        impl.update_bn(loader, swa_model)
        output = swa_model.eval()(torch.ones(1, 3))
        return swa_model, losses, rates, output, optimizer.state_dict()

    assert same(scenario)[0] == "returned"


def test_exponential_moving_average_of_weights_and_buffers() -> None:
    """Average weights and buffers at every step with a decay of 0.9: all bits equal."""

    def scenario(impl: Implementation):
        loader, optimizer, model, loss_fn = parts(impl)
        # Torch would average the number of batches too.
        model[1].num_batches_tracked = None
        ema_model = impl.AveragedModel(
            model, multi_avg_fn=impl.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        optimizer.register_step_post_hook(lambda *_: ema_model.update_parameters(model))
        losses = []
        for _ in range(3):
            train_one_epoch(loader, optimizer, model, loss_fn, losses)
        return ema_model, losses, ema_model.eval()(torch.ones(1, 3))

    assert same(scenario)[0] == "returned"


def test_schedule_alone() -> None:
    """The example of SWALR: a multiplicative schedule hands over to a linear annealing."""

    def scenario(impl: Implementation):
        loader, optimizer, model, loss_fn = parts(impl)
        scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lr_lambda=lambda _: 0.9)
        swa_scheduler = impl.SWALR(
            optimizer, anneal_strategy="linear", anneal_epochs=3, swa_lr=0.05
        )
        losses, rates = [], []
        for i in range(9):
            train_one_epoch(loader, optimizer, model, loss_fn, losses)
            if i > 4:
                swa_scheduler.step()
            else:
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return losses, rates

    assert same(scenario)[0] == "returned"
