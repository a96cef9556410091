"""The remedies of a variant that change a script by a hook of their own."""

from __future__ import annotations

from nfold.core.variant import Variant
from nfold.instrument.hooks.optimizer_hooks import FusedOptimizerHook
from nfold.instrument.hooks.patches import Patches


class ScriptRemedies:
    """Installs the hooks that a variant needs; Unsupported is raised if one changes nothing."""

    def __init__(self, variant: Variant) -> None:
        self._optimizers = FusedOptimizerHook(variant)

    def install(self, patches: Patches) -> None:
        self._optimizers.install(patches)

    def on_first_step(self) -> None:
        self._optimizers.require_applied()
