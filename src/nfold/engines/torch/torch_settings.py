"""Global settings of PyTorch that the variants of a run change."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nfold.core.variant import Variant
from nfold.interventions.intervention import TorchSetting
from nfold.interventions.registry import REGISTRY


class TorchSettings:
    """Switches the settings that any of the ``variants`` changes, and restores them."""

    def __init__(self, variants: Iterable[Variant]) -> None:
        changed = {each.name for one in variants for each, _ in one.interventions()}
        self._settings = [
            each
            for name, each in REGISTRY.items()
            if name in changed and isinstance(each, TorchSetting)
        ]
        self._initial = {each.name: each.read(torch) for each in self._settings}
        self._usual = dict(self._initial)

    def record_usual(self, variant: Variant) -> None:
        """Take the settings that ``variant`` does not change as those without an intervention."""
        changed = dict(variant.interventions())
        self._usual |= {
            each.name: each.read(torch) for each in self._settings if each not in changed
        }

    def apply(self, variant: Variant) -> None:
        changed = dict(variant.interventions())
        for each in self._settings:
            setting = each.setting(changed[each]) if each in changed else self._usual[each.name]
            if setting != each.read(torch):
                each.write(torch, setting)

    def restore(self) -> None:
        for each in self._settings:
            each.write(torch, self._initial[each.name])
