"""The remedies of a variant that change a script by a hook of their own."""

from __future__ import annotations

from contextlib import suppress

from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument.hooks.autocast_hooks import AutocastHooks
from nfold.instrument.hooks.checkpoint_hooks import CheckpointHooks
from nfold.instrument.hooks.garbage_collection import GarbageCollectionFreeze
from nfold.instrument.hooks.optimizer_hooks import FusedOptimizerHook, ZeroedGradients
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.pinned_copies import PinnedCopies
from nfold.instrument.hooks.runtime_hooks import EventCounter
from nfold.instrument.hooks.start_cores import StartCores


class ScriptRemedies:
    """Installs the hooks that a variant needs; Unsupported is raised if one changes nothing."""

    def __init__(self, variant: Variant, events: EventCounter) -> None:
        self._optimizers = FusedOptimizerHook(variant)
        self._gradients = ZeroedGradients(variant, events)
        self._autocast = AutocastHooks(enabled=variant.autocast_bf16)
        self._collector = GarbageCollectionFreeze(enabled=variant.garbage_collection_frozen)
        self._copies = PinnedCopies(enabled=variant.non_blocking_copies)
        self._cores = StartCores(enabled=variant.restored_affinity)
        self._checkpoints = CheckpointHooks(variant, events)

    def install(self, patches: Patches, warm_up: Patches) -> None:
        self._optimizers.install(patches)
        self._gradients.install(patches, warm_up)
        self._autocast.install(patches)
        self._copies.install(patches)
        self._cores.install(patches)
        self._checkpoints.install(patches, warm_up)

    def on_first_step(self) -> None:
        self._optimizers.require_applied()
        self._autocast.require_applied()
        self._checkpoints.require_applied()
        self._collector.on_first_step()
        self._cores.on_first_step()

    def end_warm_up(self) -> None:
        self._gradients.end_warm_up()
        self._copies.require_applied()

    def begin_run(self) -> None:
        """Begin a run to its end, in which a remedy that changes nothing is no error."""
        self._gradients.in_warm_up = False
        self._cores.on_first_step()
        with suppress(Unsupported):
            self._collector.on_first_step()

    def applied(self) -> dict[str, bool]:
        """Return by name whether a remedy has changed something so far."""
        return {
            "fused_optimizer": self._optimizers.has_applied,
            "set_grads_to_none": self._gradients.has_applied,
            "autocast_bf16": self._autocast.has_applied,
            "garbage_collection_frozen": self._collector.has_applied,
            "non_blocking_copies": self._copies.has_applied,
            "restored_affinity": self._cores.has_applied,
            "activation_checkpointing": self._checkpoints.has_applied,
        }

    def stop(self) -> None:
        """Remove the hooks that are no patches; models that train keep their new forward."""
        self._autocast.stop()

    def restore(self) -> None:
        self._collector.restore()
