"""What the five field reports of 2016 to 2019 measured: facts, nothing else.

Milliseconds, seconds, images per second and fractions as they were published.
"""

from __future__ import annotations

from dataclasses import dataclass

CONV2D_SETUP = (
    "TensorFlow 1 on K80 and V100 cards, 12 virtual cores; 840 images of 100 × 100, filter 3 × 3, "
    "one timed call without warm-up"
)
CONV2D_MS = {
    "V100": (14897.8, 4328.1, 5645.4, 684.2, 744.7, 731.5, 726.5, 721.6),
    "K80": (3248.4, 3380.7, 3837.3, 690.7, 691.7, 588.1, 581.1, 647.2),
}
"""By card: the one timed call on 1 to 8 GPUs."""
CONVOLVE2D_MS = 222.0
"""scipy.signal.convolve2d in a loop on one core, ± 4."""

MNIST_SETUP = "TensorFlow 1 Estimator with MirroredStrategy on GTX 1080 cards, 10,000 steps"
MNIST_STEPS = 10_000


@dataclass(frozen=True)
class MirroredRun:
    """One row of the MirroredStrategy report."""

    devices: int
    batch_per_device: int
    accuracy: float
    seconds: float


MNIST_ROWS = (MirroredRun(1, 100, 0.9511, 68.0), MirroredRun(2, 50, 0.9515, 90.6))

INCEPTION_SETUP = "TensorFlow 1 on two Titan X cards, December 2016, batch 32"
INCEPTION_RATES = {
    ("cpu", 1): ((44.6, 45.2), (0.71, 0.71)),
    ("cpu", 2): ((38.8, 42.3), (0.77, 0.82)),
    ("device", 1): ((69.2, 69.6), (0.46, 0.46)),
    ("device", 2): ((88.7, 108.9), (0.29, 0.36)),
}
"""By place of the distortion and GPUs: examples/s and s/batch, each from and to."""

CIFAR_SETUP = "PyTorch 1.1, nn.DataParallel on two RTX 2080 Ti cards, 2019, float32, 100 epochs"
CIFAR_EPOCHS = 100


@dataclass(frozen=True)
class EpochTimes:
    """Seconds of epoch 1, median seconds of the later ones, seconds in all, test accuracy."""

    first_s: float
    later_s: float
    total_s: float
    accuracy: float


def _at(hours: int, minutes: int, seconds: int) -> float:
    return 3600.0 * hours + 60 * minutes + seconds


CIFAR_CELLS: dict[tuple[str, int, int], EpochTimes | None] = {
    ("cnn10", 128, 1): EpochTimes(15.86, 13.90, _at(0, 23, 15), 0.8915),
    ("cnn10", 128, 2): EpochTimes(16.07, 11.92, _at(0, 20, 4), 0.8896),
    ("cnn10", 256, 1): EpochTimes(12.72, 12.29, _at(0, 20, 28), 0.8900),
    ("cnn10", 256, 2): EpochTimes(8.96, 9.00, _at(0, 15, 0), 0.8912),
    ("cnn10", 512, 1): EpochTimes(13.60, 11.33, _at(0, 18, 53), 0.8837),
    ("cnn10", 512, 2): EpochTimes(8.74, 7.80, _at(0, 13, 1), 0.8816),
    ("cnn10", 1024, 1): EpochTimes(16.52, 10.93, _at(0, 18, 17), 0.8860),
    ("cnn10", 1024, 2): EpochTimes(9.52, 7.24, _at(0, 12, 5), 0.8814),
    ("cnn10", 2048, 1): EpochTimes(15.50, 10.80, _at(0, 18, 3), 0.8639),
    ("cnn10", 2048, 2): EpochTimes(8.34, 7.05, _at(0, 11, 45), 0.8688),
    ("wide_resnet", 128, 1): EpochTimes(111.89, 110.42, _at(3, 3, 57), 0.8743),
    ("wide_resnet", 128, 2): EpochTimes(72.75, 70.58, _at(1, 57, 38), 0.8559),
    ("wide_resnet", 256, 1): EpochTimes(105.71, 105.47, _at(2, 55, 48), 0.8011),
    ("wide_resnet", 256, 2): EpochTimes(58.43, 60.83, _at(1, 41, 22), 0.8109),
    ("wide_resnet", 512, 1): None,
    ("wide_resnet", 512, 2): EpochTimes(59.01, 56.49, _at(1, 34, 14), 0.7695),
}
"""By model, global batch and GPUs; None ran out of memory. WRN is 28-10."""

LAYOUT_SETUP = "TensorFlow/Keras 1.13.1 on two RTX 2080 Ti cards, 2019, float32"
LAYOUT_GAINS = {"cnn10": "a little under 1.10", "wide_resnet": "a little under 1.05"}
"""By model on one GPU: channels_first over channels_last."""
