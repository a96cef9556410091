"""A small transformer learns to write Python from the standard library's: python characters.py."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention to what was before, and two layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.asked = nn.Linear(width, 3 * width)
        self.said = nn.Linear(width, width)
        self.thought = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        shape = (*text.shape[:2], self.heads, text.shape[2] // self.heads)
        parts = self.asked(self.norms[0](text)).chunk(3, dim=2)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        text = text + self.said(found.transpose(1, 2).reshape(text.shape))
        return text + self.thought(self.norms[1](text))


class Writer(nn.Module):
    """The next byte after each of a text."""

    def __init__(self, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.next = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        found: torch.Tensor = self.next(self.blocks(self.letters(text) + self.places(places)))
        return found


def library() -> torch.Tensor:
    """The bytes of the standard library's modules."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(one.read_bytes() for one in modules)), dtype=torch.uint8
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Writer(asked.length, asked.width, asked.layers, heads=6).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text, window = library().to(device), torch.arange(asked.length + 1, device=device)
    for step in range(asked.steps):
        starts = torch.randint(len(text) - asked.length - 1, (asked.batch, 1), device=device)
        piece = text[starts + window].long()
        with torch.autocast(device.type, torch.bfloat16):
            written = model(piece[:, :-1])
            loss = functional.cross_entropy(written.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
