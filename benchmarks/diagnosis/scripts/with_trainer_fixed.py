"""A small vision transformer on CIFAR-10 with Hugging Face's Trainer, told as little as it needs.

torchrun --nproc-per-node 2 with_trainer.py
"""

from __future__ import annotations

import argparse

import torch
from pictures import cifar10
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Changed(Dataset):
    """Every picture cropped, mirrored and of another brightness, drawn anew each time."""

    def __init__(self) -> None:
        self.pictures, self.labels = cifar10()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture = functional.pad(self.pictures[index].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        picture = picture[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        changed = (picture * (0.8 + 0.4 * torch.rand(())) - 0.47) / 0.25
        return {"pixel_values": changed, "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of one device")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=32,
            patch_size=4,
            num_labels=10,
            hidden_size=asked.width,
            intermediate_size=2 * asked.width,
            num_hidden_layers=asked.layers,
            num_attention_heads=asked.width // 64,
        )
    )
    told = TrainingArguments(
        output_dir="trained",
        num_train_epochs=asked.epochs,
        per_device_train_batch_size=asked.batch,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        dataloader_num_workers=8,
    )
    Trainer(model, told, train_dataset=Changed()).train()


if __name__ == "__main__":
    main()
