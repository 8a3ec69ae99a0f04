"""Recurrent network: pytorch/examples (word_language_model/model.py, main.py), on random words."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RNNModel(nn.Module):
    """Encoder, LSTM and decoder with tied weights."""

    def __init__(self, words: int = 24, width: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.shape = (layers, width)

    def init_weights(self):
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.drop(output)).flatten(0, 1)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int):
        weight = next(self.parameters())
        layers, width = self.shape
        return weight.new_zeros(layers, batch, width), weight.new_zeros(layers, batch, width)


def train():
    """Return the losses and the models."""
    model, criterion = RNNModel(), nn.NLLLoss()
    losses = []
    for _ in range(2):
        hidden = model.init_hidden(4)
        for _ in range(6):
            tokens = torch.randint(24, (9, 4))
            model.zero_grad()
            hidden = tuple(state.detach() for state in hidden)
            output, hidden = model(tokens[:-1], hidden)
            loss = criterion(output, tokens[1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-2.0)
            losses.append(loss.item())
    return losses, [model]
