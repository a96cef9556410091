"""Train models of many kinds with nfold.Run: ``user_models.py CASES.json FOLDER [--plain]``.

CASES.json maps names to a training and its settings. FOLDER/K.json gets what rank K ends with, by
name. ``--plain`` trains in plain PyTorch on one device.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import nfold
from nfold.core.errors import NfoldError
from nfold.engines.sampling import epoch_order

SAMPLES, FEATURES, TOKENS, LENGTH, WIDTH, CLASSES = 37, 6, 11, 5, 8, 3
BATCH, EPOCHS = 10, 2
Batch = dict[str, Tensor]


def made() -> Batch:
    generator = torch.Generator().manual_seed(5)
    x, z = (torch.randn(SAMPLES, FEATURES, generator=generator) for _ in range(2))
    tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=generator)
    return {"x": x, "z": z, "tokens": tokens, "y": x[:, :CLASSES].argmax(1)}


class Samples(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in made().items()}


class OneDevice:
    """Plain PyTorch, with the methods of nfold.Run that the trainings call."""

    world_size, rank = 1, 0

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.steps = 0
        self._first: Any = None

    def prepare(self, *objects: Any) -> Any:
        for one in objects:
            if isinstance(one, nn.Module):
                one.to(self.device)
            if isinstance(one, torch.optim.Optimizer) and self._first in (None, one):
                self._first = one
                one.register_step_post_hook(self._count)
        return objects[0] if len(objects) == 1 else objects

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def loader(self, _data: Any, batch_size: int, **_options: Any) -> Any:
        return PlainBatches(batch_size, self.device)

    def step(self, function: Any) -> Any:
        return function

    def mean(self, value: Tensor, count: int) -> float:
        del count
        return float(value)


class PlainBatches:
    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self.position = SimpleNamespace(epoch=0)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.from_numpy(epoch_order(SAMPLES, seed=0, epoch=self.position.epoch))
        self.position.epoch += 1
        for ids in torch.split(order, self._batch):
            yield {name: tensor[ids].to(self._device) for name, tensor in made().items()}


@dataclass
class Training:
    """``step`` makes one optimizer step and returns the mean loss of its batch."""

    models: list[nn.Module]
    step: Callable[[Batch], Tensor]
    before_epoch: Callable[[], object] = lambda: None
    before_step: Callable[[], object] = lambda: None
    results: dict[str, Any] = field(default_factory=dict)


Case = dict[str, Any]
TRAININGS: dict[str, Callable[[Any, Case], Training]] = {}


def training(function: Callable[[Any, Case], Training]) -> Callable[[Any, Case], Training]:
    TRAININGS[function.__name__] = function
    return function


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def minimise(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.dropout(torch.tanh(self.body(x))))
        return result


def net_step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    return lambda batch: minimise(
        optimizer, functional.cross_entropy(model(batch["x"]), batch["y"])
    )


class NamedOutputs(NamedTuple):
    logits: Tensor
    hidden: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """Outputs that are items and attributes, stored twice as in transformers."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        for name, value in items.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class AttributeDict(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda logits, hidden: (logits, hidden),
    "list": lambda logits, hidden: [logits, {"hidden": hidden}],
    "dict": lambda logits, hidden: {"logits": logits, "hidden": hidden},
    "named_tuple": NamedOutputs,
    "model_output": lambda logits, hidden: ModelOutput(logits=logits, hidden=hidden),
    "attribute_dict": lambda logits, hidden: AttributeDict(logits=logits, hidden=hidden),
    "object": lambda logits, hidden: SimpleNamespace(logits=logits, hidden=hidden),
}
READERS: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "tuple": lambda outputs: outputs,
    "list": lambda outputs: (outputs[0], outputs[1]["hidden"]),
    "dict": lambda outputs: (outputs["logits"], outputs["hidden"]),
    "named_tuple": lambda outputs: (outputs.logits, outputs.hidden),
    "model_output": lambda outputs: (outputs.logits, outputs["hidden"]),
    "attribute_dict": lambda outputs: (outputs.logits, outputs["hidden"]),
    "object": lambda outputs: (outputs.logits, outputs.hidden),
}


class SeveralInputs(nn.Module):
    def __init__(self, outputs: str) -> None:
        super().__init__()
        self.outputs = outputs
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.net = Net()

    def forward(
        self, x: Tensor, cache: Any, added: list[Tensor], *, context: dict[str, list[Tensor]]
    ) -> Any:
        (tokens,) = context["tokens"]
        added.append(self.net.head.weight.abs().mean())
        cache.hidden = torch.tanh(self.net.body(x) + self.embedding(tokens).mean(1))
        return OUTPUTS[self.outputs](self.net.head(cache.hidden), cache.hidden)


@training
def several_inputs(run: Any, case: Case) -> Training:
    """An array, an object and a list that the model changes, and a dictionary with a list."""
    model = SeveralInputs(case["outputs"])
    model, optimizer = run.prepare(model, sgd(model.parameters()))

    def step(batch: Batch) -> Tensor:
        cache, added = SimpleNamespace(hidden=None), list[Tensor]()
        outputs = model(batch["x"], cache, added, context={"tokens": [batch["tokens"]]})
        logits, hidden = READERS[case["outputs"]](outputs)
        assert cache.hidden is not None
        loss = functional.cross_entropy(logits, batch["y"]) + 0.1 * hidden.square().mean()
        return minimise(optimizer, loss + sum(added))

    return Training([model], step)


class OwnLoss(nn.Module):
    def __init__(self, *, attribute: bool) -> None:
        super().__init__()
        self.attribute = attribute
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        loss = functional.cross_entropy(logits, labels)
        return ModelOutput(loss=loss, logits=logits) if self.attribute else (logits, loss)


@training
def own_loss(run: Any, case: Case) -> Training:
    model = OwnLoss(attribute=case["attribute"])
    model, optimizer = run.prepare(model, sgd(model.parameters()))

    def step(batch: Batch) -> Tensor:
        outputs = model(batch["x"], labels=batch["y"])
        return minimise(optimizer, outputs.loss if case["attribute"] else outputs[1])

    return Training([model], step)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.output(torch.tanh(self.hidden(self.embedding(tokens))))
        return result


@training
def tied(run: Any, case: Case) -> Training:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)

    def step(batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return minimise(optimizer, functional.cross_entropy(logits, tokens[:, 1:].flatten()))

    del case
    return Training([model], step)


@training
def tied_models(run: Any, case: Case) -> Training:
    """Two prepared models that share a weight, and a part of the second that is prepared too."""
    first, second = nn.Linear(FEATURES, FEATURES), Net()
    second.body[0] = nn.Linear(FEATURES, FEATURES)
    second.body[2] = nn.Linear(FEATURES, WIDTH)
    second.body[0].weight = first.weight
    shared = {*first.parameters()}
    others = [p for p in second.parameters() if p not in shared]
    optimizer = sgd([*first.parameters(), *others])
    first, second, _, optimizer = run.prepare(first, second, second.head, optimizer)
    del case
    return Training([first, second], net_step(lambda x: second(first(x)), optimizer))


@training
def frozen(run: Any, case: Case) -> Training:
    """``unfreeze``: None, ``epoch`` or the step before which the body becomes trainable.

    ``freeze``: the step before which it is frozen, if not from the beginning. ``only_trained``: the
    optimizer has no frozen parameters.
    """
    model, when = Net(), case.get("unfreeze")
    part = model if case.get("whole") else model.body
    part.requires_grad_("freeze" in case)
    trained = model.head.parameters() if case.get("only_trained") else model.parameters()
    model, optimizer = run.prepare(model, sgd(trained))
    epochs: list[int] = []

    def before_epoch() -> None:
        epochs.append(len(epochs))
        if when == "epoch" and len(epochs) == 2:
            model.requires_grad_(True)

    def before_step() -> None:
        if run.steps == case.get("freeze"):
            model.body.requires_grad_(False)
        if run.steps == when and not model.body[0].weight.requires_grad:
            model.requires_grad_(True)
            if case.get("only_trained"):
                optimizer.add_param_group({"params": model.body.parameters()})

    def step(batch: Batch) -> Tensor:
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        return minimise(optimizer, loss) if loss.requires_grad else loss

    return Training([model], step, before_epoch, before_step)


@training
def compiled(run: Any, case: Case) -> Training:
    backend = case.get("backend", "eager")
    model: Any = Net()
    if case["method"]:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    return Training([model], net_step(model, optimizer))


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + functional.linear(x @ self.down.T, self.up)
        return result


@training
def lora(run: Any, case: Case) -> Training:
    """``late``: adapters are added to a prepared model, which is prepared ``again`` or not."""
    model = Net()
    if case.get("late"):
        model = run.prepare(model)
    for name in ("0", "2"):
        setattr(model.body, name, LoRALinear(getattr(model.body, name)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = run.prepare(torch.optim.AdamW(trained, lr=0.01))
    if case.get("late") != "only":
        model = run.prepare(model)
    return Training([model], net_step(model, optimizer))


@training
def dropout(run: Any, case: Case) -> Training:
    model = Net(dropout=0.3)
    model, optimizer = run.prepare(model, sgd(model.parameters(), lr=0.05))
    del case
    return Training([model], net_step(model, optimizer))


@training
def two_optimizers(run: Any, case: Case) -> Training:
    """Two parameter groups, a rate for each optimizer, and clipping."""
    model = Net(dropout=case.get("dropout", 0.0))
    groups = [
        {"params": model.body[0].parameters(), "lr": 0.02},
        {"params": [*model.body[2:].parameters()]},
    ]
    body = sgd(groups)
    head = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    schedules = [
        lr_scheduler.OneCycleLR(body, max_lr=[0.05, 0.1], total_steps=100, cycle_momentum=False),
        lr_scheduler.CosineAnnealingLR(head, T_max=20),
    ]
    model, head, body, *schedules = run.prepare(model, head, body, *schedules)

    def step(batch: Batch) -> Tensor:
        for optimizer in (body, head):
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.body.parameters(), 0.1)
        if model.head.weight.grad is not None:  # None before the last part of a step
            nn.utils.clip_grad_value_(model.head.parameters(), 0.02)
        for each in (body, head, *schedules):
            each.step()
        return loss.detach()

    return Training([model], step)


@training
def gan(run: Any, case: Case) -> Training:
    """``switch``: the generator's backward passes a critic without gradients; ``joint``: in one model."""
    generator = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1, bias=False))
    first = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    models = [nn.ModuleList([generator, critic])] if case.get("joint") else [generator, critic]
    run.prepare(*models, first, second)

    def penalty(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        result: Tensor = (slope.norm(dim=1) - 1).square().mean()
        return result

    def step(batch: Batch) -> Tensor:
        real, generated = batch["x"], generator(batch["z"])
        for optimizer in (first, second):
            optimizer.zero_grad()
        critic_loss: Tensor = critic(generated.detach()).mean() - critic(real).mean()
        if case["switch"]:
            (critic_loss + penalty(real)).backward()  # type: ignore[no-untyped-call]
        else:
            critic_loss.backward()  # type: ignore[no-untyped-call]
            penalty(real).backward()  # type: ignore[no-untyped-call]
        second.step()
        second.zero_grad()
        critic.requires_grad_(not case["switch"])
        loss = minimise(first, -critic(generated).mean())
        critic.requires_grad_(True)
        return loss + critic_loss.detach()

    return Training([generator, critic], step)


@training
def schedules(run: Any, case: Case) -> Training:
    """A warm-up and then cosine in each step, a rate in each epoch, a rate of the loss."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    by_step = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
    by_epoch = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    by_loss = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    model, optimizer = run.prepare(model, optimizer)
    by_step, by_epoch, by_loss = run.prepare(by_step, by_epoch, by_loss)
    plain = net_step(model, optimizer)
    found: list[float] = []

    def before_epoch() -> None:
        if found:
            by_epoch.step()
            by_loss.step(found[-1])

    def step(batch: Batch) -> Tensor:
        loss = plain(batch)
        by_step.step()
        found.append(run.mean(loss, count=len(batch["y"])))
        return loss

    del case
    return Training([model], step, before_epoch)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant, self.shared = reentrant, shared
        self.net = Net()
        self.block = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.other = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.requires_grad_()
        for block in (self.block, self.block if self.shared else self.other):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: Tensor = checkpoint(self.net.body, x, use_reentrant=self.reentrant)
        return self.net.head(result)  # type: ignore[no-any-return]


@training
def checkpointed(run: Any, case: Case) -> Training:
    model = Checkpointed(reentrant=case["reentrant"], shared=case["shared"])
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    return Training([model], net_step(model, optimizer))


@training
def plain(run: Any, case: Case) -> Training:
    """``optimizer`` Rprop has no fused form; LBFGS and ``closure`` compute the loss in the step."""
    model = Net()
    search = {"line_search_fn": case.get("line_search")} if "line_search" in case else {}
    options: dict[str, Any] = {
        "SGD": {"lr": 0.1},
        "Rprop": {"lr": 0.01},
        "LBFGS": {"lr": 0.3, "max_iter": 4, "history_size": 4, **search},
    }
    name = case.get("optimizer", "SGD")
    optimizer = getattr(torch.optim, name)(model.parameters(), **options[name])
    model, optimizer = run.prepare(model, optimizer)

    def step(batch: Batch) -> Tensor:
        if not case.get("closure"):
            return net_step(model, optimizer)(batch)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Tensor = optimizer.step(closure)
        return loss.detach()

    return Training([model], step)


@training
def not_prepared(run: Any, case: Case) -> Training:
    """The optimizer updates a model that is not prepared."""
    model, other = Net(), nn.Linear(FEATURES, FEATURES)
    optimizer = sgd([*model.parameters(), *other.parameters()])
    model, optimizer = run.prepare(model, optimizer)
    other.to(run.device)
    del case
    return Training([model], net_step(lambda x: model(other(x)), optimizer))


def train(case: Case, run: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    one = TRAININGS[case["training"]](run, case)
    loader = run.loader(
        Samples() if case.get("dataset") else made(),
        batch_size=case.get("batch", BATCH),
        shuffle=True,
        workers=0,
    )
    resumed = run.resume(case["folder"]) if "folder" in case else None
    calls = itertools.count()

    def counted(batch: Batch) -> Tensor:
        next(calls)
        return one.step(batch)

    step = run.step(counted) if case.get("run_step") else counted
    losses = []
    for _ in range(loader.position.epoch, case.get("epochs", EPOCHS)):
        one.before_epoch()
        for batch in loader:
            one.before_step()
            losses.append(run.mean(step(batch), count=len(batch["y"])))
            if run.steps == case.get("stop") and resumed is None:
                run.checkpoint(case["folder"])
                return {}
    parameters = [p.detach().flatten().cpu() for model in one.models for p in model.parameters()]
    return {
        "losses": losses,
        "parameters": torch.cat(parameters).tolist(),
        "steps": run.steps,
        "calls": next(calls),
    }


def run_case(case: Case, folder: Path, *, in_plain: bool) -> dict[str, Any]:
    """Return the end of a training, with its warnings, or its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "folder" in case:
            case = {**case, "folder": str(folder / case["folder"])}
        device = case.get("plan", {}).get("device", "cpu")
        run = OneDevice(device) if in_plain else nfold.Run(**case.get("plan", {}))
        try:
            found = train(case, run)
        except NfoldError as error:
            found = {"error": str(error)}
    return {**found, "warnings": [str(one.message) for one in caught]}


def main(cases: Path, folder: Path, *flags: str) -> None:
    found = {
        name: run_case(case, folder, in_plain="--plain" in flags)
        for name, case in json.loads(cases.read_text()).items()
    }
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
