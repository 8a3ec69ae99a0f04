"""A loop with Accelerate that averages, saves and resumes, as docs/callbacks.md describes."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import modkit
from modkit.distributed import FullState


def train_with_accelerate(folder, *, resume_from=None, epochs=2, save_every=3):
    """Train from the start or from a checkpoint; return the model, its EMA and the loss of the average."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(0)
    inputs = torch.randn(64, 4)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    # With a generator of its own the loader takes no random numbers from dropout.
    numbers = torch.Generator()
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, generator=numbers)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)

    ema = modkit.EMA(model, decay=0.9).attach(optimizer)  # before prepare()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(FullState(ema))

    done = 0
    if resume_from is not None:
        accelerator.load_state(resume_from)
        done = int(Path(resume_from).name.removeprefix("batch-"))
    for epoch in range(done // len(loader), epochs):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, done % len(loader))
        for x, y in rest:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done % save_every == 0 and accelerator.sync_gradients:
                accelerator.save_state(f"{folder}/batch-{done}")
        with ema.applied(), torch.no_grad():  # evaluate the average
            model.eval()
            average_loss = (model(inputs) - inputs.square().sum(1, keepdim=True)).square().mean()
            model.train()
    with ema.applied():  # and save it
        accelerator.save_model(model, f"{folder}/average")
    return model, ema, average_loss
