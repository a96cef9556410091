"""A text classifier with Hugging Face's Trainer: torchrun --nproc-per-node 2 text_trainer.py."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(Dataset):
    """Random texts of 128 tokens."""

    def __init__(self, count: int = 20_000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 30_000, (count, 128), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": mask, "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="of one device")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=asked.width,
        intermediate_size=4 * asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 64,
    )
    told = TrainingArguments(
        output_dir="trained",
        num_train_epochs=asked.epochs,
        per_device_train_batch_size=asked.batch,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    Trainer(BertForSequenceClassification(config), told, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()
