import torch
from torch import nn


class Attention(nn.Module):
    """One head over 5 positions with a causal mask in a buffer, as small GPTs have it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 7)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, dim=-1)
        return self.head((q @ k.transpose(-2, -1) / 6**0.5 + self.mask).softmax(-1) @ v).transpose(1, 2)


def make_model():
    torch.manual_seed(0)
    return Attention()


def load_data(partition):
    tokens = torch.randint(0, 7, (12, 6), generator=torch.Generator().manual_seed(partition))
    return tokens[:, :-1], tokens[:, 1:]
