"""What of Keras's back ends is installed, known without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from nfold.errors import ExtraMissing

REQUIREMENTS: dict[str, tuple[str, str]] = {
    "tensorflow": ("tensorflow", "tensorflow"),
    "jax": ("jax", "jax"),
    "keras-torch": ("keras", "keras"),
}
"""The library that a framework needs besides Keras, and the extra that brings both."""

JAX_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
TENSORFLOW_WITHOUT_CUDA = ("tensorflow-cpu", "tensorflow-cpu-aws", "tensorflow-intel")


def check_installed(framework: str) -> None:
    """Raise ExtraMissing for what a framework needs and is not there."""
    library, extra = REQUIREMENTS[framework]
    for name in (library, "keras"):
        if find_spec(name) is None:
            raise ExtraMissing(name, extra)


def missing_cuda_reason(framework: str) -> str | None:
    """Why a framework's installed build cannot see a GPU, or None where it may."""
    if framework == "tensorflow":
        built = next((name for name in TENSORFLOW_WITHOUT_CUDA if installed_version(name)), None)
        if built and not installed_version("tensorflow"):
            return (
                f"{built} {installed_version(built)} was built without CUDA; next: --framework jax or torch, "
                "or --device cpu"
            )
    if framework == "jax" and not any(map(installed_version, JAX_PLUGINS)):
        return (
            f"jax {installed_version('jax')} is here without its CUDA plugin "
            f"({' or '.join(JAX_PLUGINS)}); next: pip install 'jax[cuda13]', or --device cpu"
        )
    return None


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
