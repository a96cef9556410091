"""The frameworks by name. A framework is imported when it is first asked for."""

from __future__ import annotations

import importlib

from nfold.errors import UnknownValue
from nfold.frameworks.base import Framework

FRAMEWORK_CLASSES: dict[str, str] = {
    "simulated": "nfold.frameworks.simulated:Simulated",
    "torch": "nfold.frameworks.torch.framework:TorchFramework",
    "tensorflow": "nfold.frameworks.keras.framework:TensorFlow",
    "jax": "nfold.frameworks.keras.framework:Jax",
    "keras-torch": "nfold.frameworks.keras.framework:KerasTorch",
}


def get_framework(name: str) -> Framework:
    """The framework called ``name``; UnknownValue lists the known ones."""
    if name not in FRAMEWORK_CLASSES:
        raise UnknownValue("framework", name, FRAMEWORK_CLASSES)
    module, _, attribute = FRAMEWORK_CLASSES[name].partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    assert isinstance(made, Framework)
    return made
