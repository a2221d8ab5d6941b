import csv

import torch
from torch import nn


def make_model():
    with open("data/shape.csv") as file:
        inputs, hidden, classes = map(int, next(csv.reader(file)))
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def load_data(partition):
    rng = torch.Generator().manual_seed(partition)
    labels = torch.randint(0, 3, (40,), generator=rng)
    return torch.randn(40, 4, generator=rng) + 2 * nn.functional.one_hot(labels, 4), labels


def train(model, inputs, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def accuracy(model, inputs, labels):
    return float((model(inputs).argmax(1) == labels).float().mean())
