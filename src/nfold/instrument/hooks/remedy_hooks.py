"""Applies remedies to a script for its whole length, with the hooks of an explanation."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nfold.core.variant import LOADER_FIELDS, RunRemedies
from nfold.engines.interleaver import ConstantVariant
from nfold.engines.torch.torch_settings import TorchSettings
from nfold.instrument.hooks.distributed_hooks import DataParallelHooks
from nfold.instrument.hooks.model_hooks import ChannelsLastWeights, ModelCompiler
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import (
    AnomalyDetectionHook,
    EventCounter,
    ThreadCountHook,
)
from nfold.instrument.hooks.script_remedies import ScriptRemedies
from nfold.instrument.input.loader_workers import TrainingLoaderSettings
from nfold.interventions.intervention import Intervention

OF_WRAPPERS = {"broadcast_buffers", "gradient_compression", "synchronised_batch_norm"}
COMPILED_STEPS = 10  # models that train later than this are not compiled


class RemedyHooks:
    """The hooks of one process.

    After ``COMPILED_STEPS`` optimizer steps a step calls only a hook that counts them, and the
    ``forward`` of SyncBatchNorm if that is replaced.
    """

    def __init__(self, remedies: RunRemedies) -> None:
        variant = ConstantVariant(remedies.variant)
        events = EventCounter()
        self._remedies = remedies
        self._wrappers = DataParallelHooks(variant, self._on_wrap)
        self._has_ddp = False
        self._weights = ChannelsLastWeights()
        self._anomalies = AnomalyDetectionHook(variant, events)
        self._threads = ThreadCountHook(variant, events)
        self._settings = TorchSettings(variant.all_variants)
        self._compiler = ModelCompiler(remedies.variant.compiled)
        self._own = ScriptRemedies(remedies.variant, events)
        arguments = remedies.variant.loader_arguments()
        self._loaders = (
            TrainingLoaderSettings(remedies.workers, remedies.batch, arguments)
            if arguments or set(LOADER_FIELDS).intersection(remedies.names)
            else None
        )
        self._steps = 0

    def install(self, patches: Patches) -> None:
        """Install the hooks that the remedies need; the script has just imported torch."""
        variant, counters = self._remedies.variant, Patches()
        changed = {each.name for each, _ in variant.interventions()}
        if variant.ddp_arguments() or changed & OF_WRAPPERS:
            self._wrappers.install(patches, counters)
        if variant.channels_last:
            self._weights.install(patches)
        if not variant.anomaly_detection:
            self._anomalies.install(patches, counters)
        if self._loaders is not None:
            self._loaders.install(patches)
        self._own.install(patches, counters)
        self._settings.apply(variant)
        self._threads.install(patches, counters)  # the script cannot change a number that is set
        counters.undo()
        self._compiler.start()
        register_optimizer_step_post_hook(self._on_step)

    def applied(self) -> tuple[str, ...]:
        """Return the names of the remedies that have changed something so far."""
        changed = self._remedies.variant.interventions()
        found = [each.name for each, value in changed if self._is_applied(each, value)]
        if self._loaders is not None and self._loaders.has_found:
            found += [name for name in LOADER_FIELDS if name in self._remedies.names]
        return tuple(found)

    def _is_applied(self, intervention: Intervention[Any], value: Any) -> bool:
        by_hooks = {
            "broadcast_buffers": self._has_ddp,
            "gradient_compression": self._has_ddp,
            "synchronised_batch_norm": self._wrappers.has_replaced_batch_norm,
            "channels_last": self._weights.has_converted,
            "compiled": self._compiler.has_compiled,
            "anomaly_detection": self._anomalies.was_requested,
        }
        if intervention.ddp_arguments(value):
            return self._has_ddp
        if intervention.loader_arguments(value):
            return self._loaders is not None and self._loaders.has_set_arguments
        by_hooks |= self._own.applied()
        # Variables and settings of PyTorch are always applied.
        return by_hooks.get(intervention.name, True)

    def _on_wrap(self) -> None:
        self._has_ddp |= bool(self._wrappers.ddp)
        # A script that replaces its model must be able to free the old one.
        self._wrappers.ddp.clear()
        self._wrappers.dp.clear()

    def _on_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._steps >= COMPILED_STEPS:
            return  # a hook cannot be removed while PyTorch calls the hooks
        self._steps += 1
        if self._steps == 1:
            # The script may have changed settings in the code before its first step.
            self._settings.apply(self._remedies.variant)
            self._own.begin_run()
            if self._loaders is not None:
                self._loaders.has_stepped = True
        if self._steps == COMPILED_STEPS:
            self._compiler.stop()
