"""Models as users have them, from timm and transformers, with losses, optimizers and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GPT2_VOCABULARY = 50257
BERT_VOCABULARY = 30522


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model, and what a training loop needs beside it.

    Attributes:
        batch: samples of a step per device.
        loss: (model, *batch) to a scalar, as a user's loop computes it.
        samples: (count, device) to the tensors of so many samples.
    """

    batch: int
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[..., Tensor]
    samples: Callable[[int, torch.device], tuple[Tensor, ...]]
    has_images: bool = False


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, **options)


def classification_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def images_of(size: int, classes: int) -> Callable[[int, torch.device], tuple[Tensor, ...]]:
    def samples(count: int, device: torch.device) -> tuple[Tensor, ...]:
        count = min(count, 2048)  # larger sets would not change a step
        images = torch.randn(count, 3, size, size, device=device)
        return images, torch.randint(classes, (count,), device=device)

    return samples


def tokens_of(length: int, vocabulary: int) -> Callable[[int, torch.device], tuple[Tensor, ...]]:
    return lambda count, device: (torch.randint(vocabulary, (count, length), device=device),)


def resnet18() -> nn.Module:
    """ResNet-18 in its CIFAR form: a first convolution of 3 x 3, no pooling behind it."""
    import timm

    model: Any = timm.create_model("resnet18", num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def from_timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=1000)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """GPT-2 124M without dropout, as it is pretrained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **none))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 10))


MODELS = {
    "resnet18": OwnModel(
        batch=512,
        model=resnet18,
        optimizer=sgd,
        loss=classification_loss,
        samples=images_of(32, 10),
        has_images=True,
    ),
    "resnet50": OwnModel(
        batch=128,
        model=lambda: from_timm("resnet50"),
        optimizer=sgd,
        loss=classification_loss,
        samples=images_of(176, 1000),
        has_images=True,
    ),
    "vit_s": OwnModel(
        batch=128,
        model=lambda: from_timm("vit_small_patch16_224"),
        optimizer=adamw,
        loss=classification_loss,
        samples=images_of(224, 1000),
        has_images=True,
    ),
    "gpt2": OwnModel(
        batch=24,
        model=gpt2,
        optimizer=adamw,
        loss=language_loss,
        samples=tokens_of(512, GPT2_VOCABULARY),
    ),
    "bert": OwnModel(
        batch=64,
        model=bert,
        optimizer=adamw,
        loss=language_loss,
        samples=tokens_of(256, BERT_VOCABULARY),
    ),
    "tiny": OwnModel(
        batch=64,
        model=tiny,
        optimizer=sgd,
        loss=classification_loss,
        samples=images_of(8, 10),
        has_images=True,
    ),
}
