"""Reinforcement learning: the loop of vwxyzjn/cleanrl (dqn.py), on a chain of states."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class QNetwork(nn.Module):
    """Values of two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 2)
        )

    def forward(self, x):
        return self.network(x)


def step(state: int, action: int) -> tuple[int, float, bool]:
    """Move in a chain of six states; the last one ends the episode with a reward."""
    following = min(max(state + (1 if action else -1), 0), 5)
    return following, float(following == 5), following == 5


def train():
    """Return the losses and the models."""
    q_network, target_network = QNetwork(), QNetwork()
    optimizer = torch.optim.Adam(q_network.parameters(), lr=2.5e-3)
    target_network.load_state_dict(q_network.state_dict())
    states = torch.eye(6)
    buffer, losses, state = [], [], 0
    for global_step in range(120):
        epsilon = max(0.05, 1 - global_step / 60)
        if torch.rand(()) < epsilon:
            action = int(torch.randint(2, ()))
        else:
            action = int(q_network(states[state]).argmax())
        following, reward, done = step(state, action)
        buffer.append((state, action, following, reward, done))
        state = 0 if done else following
        if global_step < 20:
            continue
        batch = [buffer[int(i)] for i in torch.randint(len(buffer), (8,))]
        before, actions, after, rewards, ends = map(torch.tensor, zip(*batch, strict=True))
        with torch.no_grad():
            target_max = target_network(states[after]).max(dim=1).values
            target = rewards + 0.99 * target_max * ~ends
        value = q_network(states[before]).gather(1, actions[:, None]).squeeze()
        loss = F.mse_loss(target, value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if global_step % 10 == 0:
            pairs = zip(target_network.parameters(), q_network.parameters(), strict=True)
            for target_parameter, parameter in pairs:
                target_parameter.data.copy_(0.9 * parameter.data + 0.1 * target_parameter.data)
    return losses, [q_network, target_network]
