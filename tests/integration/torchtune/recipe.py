"""A torchtune-style recipe that averages, saves and resumes, as docs/callbacks.md describes."""

from pathlib import Path

import torch

import modkit


class Recipe:
    def __init__(self, config):
        self.config = config
        self.folder = Path(config["output_dir"])
        self.epochs_run = 0

    def setup(self):
        """Build everything, and resume if the configuration says so."""
        torch.manual_seed(self.config["seed"])
        self.inputs = torch.randn(64, 4)
        self.targets = self.inputs.square().sum(1, keepdim=True)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.ema = modkit.EMA(self.model, decay=self.config["ema_decay"])
        if self.config["resume_from_checkpoint"]:
            state = torch.load(self.folder / "recipe_state.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.ema.load_state_dict(state["ema"])
            self.epochs_run = state["epochs_run"]

    def save_checkpoint(self, epoch):
        """Save the averaged weights, and the state to resume from."""
        weights = self.folder / f"epoch_{epoch}"
        weights.mkdir(parents=True, exist_ok=True)
        with self.ema.applied():
            torch.save(self.model.state_dict(), weights / "model.pt")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict(),
            "epochs_run": self.epochs_run,
        }
        torch.save(state, self.folder / "recipe_state.pt.part")
        (self.folder / "recipe_state.pt.part").replace(self.folder / "recipe_state.pt")

    def train(self):
        """Run the remaining epochs."""
        for epoch in range(self.epochs_run, self.config["epochs"]):
            torch.manual_seed(self.config["seed"] + epoch)
            for i, batch in enumerate(torch.randperm(64).split(8)):
                loss = (self.model(self.inputs[batch]) - self.targets[batch]).square().mean()
                (loss / self.config["gradient_accumulation_steps"]).backward()
                if (i + 1) % self.config["gradient_accumulation_steps"] == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.ema.update()
            self.epochs_run += 1
            with self.ema.applied():
                self.evaluate()
            self.save_checkpoint(epoch)

    @torch.no_grad()
    def evaluate(self):
        """Store the loss of the weights that are in the model."""
        self.model.eval()
        self.loss = (self.model(self.inputs) - self.targets).square().mean().item()
        self.model.train()
