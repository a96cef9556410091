"""Variants: interventions that an experiment applies to a plan to measure what something costs.

A variant is separate from a plan because it may change the result of a training: a model that was
trained under a variant is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from nfold.core.plan import Plan
from nfold.core.serialization import StoredAsDict, read_value, serialize
from nfold.interventions.intervention import Intervention
from nfold.interventions.registry import REGISTRY, Interventions


class Variant(Interventions, StoredAsDict):
    """Interventions of one experiment; the default has none. Immutable.

    Keyword arguments are the attributes of ``Interventions``, and have the types of their values.

    Raises:
        TypeError: There is no intervention of this name.
        UsageError: A value is never allowed.
    """

    def __init__(self, **values: Any) -> None:
        if unknown := sorted(values.keys() - REGISTRY.keys()):
            raise TypeError(f"there is no intervention {', '.join(unknown)}")
        # Only values other than the default, in the order of the registry.
        for name in [name for name in REGISTRY if name in values]:
            if values[name] != REGISTRY[name].default:
                REGISTRY[name].check(values[name])
                vars(self)[name] = values[name]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a variant cannot be changed: {name}")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Variant) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __bool__(self) -> bool:
        return bool(vars(self))

    def __repr__(self) -> str:
        return f"Variant({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __str__(self) -> str:
        words = [f"{each.stored_name} {value}" for each, value in self.interventions()]
        return ", ".join(words) or "no interventions"

    def interventions(self) -> list[tuple[Intervention[Any], Any]]:
        """Return the interventions and their values, without those at their default."""
        return [(REGISTRY[name], value) for name, value in vars(self).items()]

    @property
    def preserves_training(self) -> bool:
        """Return whether a model trained under this variant is the same as without it."""
        return all(each.is_observation for each, _ in self.interventions())

    @property
    def ranks_synchronize(self) -> bool:
        return self.exchange != "none" and (not self.independent or self.exchange_after_backward)

    def device_of(self, rank: int, local_rank: int) -> int:
        """Return the index of the device that a rank drives on its host."""
        return self.devices[rank] if self.devices else self.device + local_rank

    def merge(self, other: Variant) -> Variant:
        """Combine the interventions of both; ``other`` overrides."""
        return Variant(**{**vars(self), **vars(other)})

    def without(self, *names: str) -> Variant:
        """Return the variant with the defaults of the interventions ``names``."""
        return Variant(**{name: value for name, value in vars(self).items() if name not in names})

    def refusal(self, plan: Plan) -> str | None:
        """Return why no framework can apply this variant to the complete plan, or None."""
        reasons = (
            each.refusal(value, plan) or each.conflict(value, vars(self))
            for each, value in self.interventions()
        )
        return next((reason for reason in reasons if reason), None)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables to add to the ``environment`` in which ranks start."""
        added: dict[str, str] = {}
        for each, value in self.interventions():
            added |= each.environment(value, {**environment, **added})
        return added

    def ddp_arguments(self) -> dict[str, Any]:
        """Return arguments to replace in the constructor of DistributedDataParallel."""
        arguments: dict[str, Any] = {}
        for each, value in self.interventions():
            arguments |= each.ddp_arguments(value)
        return arguments

    def loader_arguments(self) -> dict[str, Any]:
        """Return arguments to replace in the DataLoaders that feed the training."""
        arguments: dict[str, Any] = {}
        for each, value in self.interventions():
            arguments |= each.loader_arguments(value)
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. Defaults are omitted, so that ids survive new interventions."""
        return {each.stored_name: serialize(value) for each, value in self.interventions()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "Variant") -> Variant:
        """Return the variant that ``to_dict`` wrote. Raises ValueError for an unknown entry."""
        known = {each.stored_name: each for each in REGISTRY.values()}
        if unknown := sorted(values.keys() - known.keys()):
            raise ValueError(f"{where}: unknown entries {unknown}; known are {sorted(known)}")
        return cls(
            **{
                known[entry].name: read_value(known[entry].value_type, value, f"{where}.{entry}")
                for entry, value in values.items()
            }
        )


NO_INTERVENTIONS = Variant()
LOADER_FIELDS = ("workers", "batch")  # of a plan, that a run of a script applies


@dataclass(frozen=True, kw_only=True)
class RunRemedies:
    """The remedies that every rank of ``nfold run`` applies to its script.

    Attributes:
        variant: remedies that are interventions.
        workers, batch: ``num_workers`` and ``batch_size`` of the DataLoaders that feed the training;
            None: the script's.
        refused: reasons of remedies that these devices do not have, by name.
    """

    variant: Variant = NO_INTERVENTIONS
    workers: int | None = None
    batch: int | None = None
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the remedies to apply."""
        of_loaders = [name for name in LOADER_FIELDS if getattr(self, name) is not None]
        return (*(each.name for each, _ in self.variant.interventions()), *of_loaders)
