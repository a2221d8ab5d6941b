import torch
from torch import nn


class Gated(nn.Module):
    """Takes two tensors: values, and which of them count."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, values, mask):
        return self.layers(values * mask * self.scale)


def make_model():
    return Gated()


def load_records(client, num_clients):
    rng = torch.Generator().manual_seed(client)
    labels = torch.randint(0, 3, (30 + client,), generator=rng)
    values = torch.randn(len(labels), 4, generator=rng) + 2 * nn.functional.one_hot(labels, 4)
    return {"values": values, "mask": torch.ones_like(values)}, labels


def evaluate(model):
    inputs, labels = load_records(10**6, 0)
    outputs = model(**inputs)
    accuracy = (outputs.argmax(1) == labels).float().mean()
    return {"accuracy": float(accuracy), "perplexity": float(nn.functional.cross_entropy(outputs, labels).exp())}
