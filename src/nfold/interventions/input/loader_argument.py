"""The base class of interventions that change arguments of a script's DataLoaders."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from nfold.core.plan import Plan
from nfold.core.source_edit import SetKeywords, SourceEdit
from nfold.interventions.intervention import Intervention, Numerics

T = TypeVar("T")


class LoaderArgument(Intervention[T]):
    """An argument of the DataLoaders that feed the training of a script.

    ``needs_workers``: it changes nothing in a DataLoader without worker processes.
    """

    kind = "remedy"
    numerics: ClassVar[Numerics | None] = "same"
    needs_workers: ClassVar[bool] = True
    refused_in_workloads = "workloads set the arguments of their loaders"
    needed_in_run = "DataLoader with worker processes"

    def refusal(self, value: T, plan: Plan) -> str | None:
        if self.needs_workers and plan.workers == 0:
            return "the DataLoaders have no worker processes"
        return None

    def is_useful(self, profile: Any) -> bool:
        loader = profile.loader
        return loader is not None and (loader.num_workers > 0 or not self.needs_workers)

    def source_edits(self, value: T, profile: Any) -> tuple[SourceEdit, ...] | None:
        # The Trainer of transformers makes the DataLoaders itself.
        line = profile.training_loader.created_at
        if line is None or profile.trainer == "transformers":
            return None
        arguments = self.loader_arguments(value).items()
        keywords = tuple((name, repr(argument)) for name, argument in arguments)
        return (SetKeywords(location=line, function="DataLoader", keywords=keywords),)
