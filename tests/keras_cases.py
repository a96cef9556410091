"""What PyTorch and Keras's back ends are both asked, so that their answers can be compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from made import arrays, machine
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.data.arrays import DataSetArrays
from nfold.engines.base import Task
from nfold.workloads import network, parameters
from photos import picture

STEPS = 5
CLASSES = 10
LAYOUTS = ("channels_last", "channels_first")
AUGMENTED, DISTORTED, RATED = "augmented", "distorted", "rates"
PEAK = 0.4
OPERATIONS = (("crop", 4), ("flip", 0), ("cutout", 3))


@dataclass(frozen=True)
class Case:
    """A workload, and whether its layers run as in training. ``steps``: the layouts in which
    losses of the first steps are compared as well.

    Dropout draws from every library's own generator, so a network with it is compared without.
    Batch norm over the 8 values that the smallest grid of Inception-v3 has makes much of rounding:
    it is compared with fixed statistics, and ``exact``, in float64: in float32 some of its ReLUs
    are open in one library and shut in the other, which was up to 4 % of a gradient. For the same
    reason cnn10 has one image, of a ``draw`` in which no ReLU's input is within 1e-5 of 0.
    """

    workload: str
    side: int
    channels: int
    training: bool = True
    exact: bool = False
    layouts: tuple[str, ...] = LAYOUTS[:1]
    steps: tuple[str, ...] = ()
    images: int = 4
    draw: int = 0

    def task(self, framework: str, **changes: Any) -> Task:
        """A short run on one CPU device, in float32."""
        asked = Plan(
            framework=framework,
            device="cpu",
            devices=1,
            batch=8,
            steps=STEPS,
            warmup_steps=0,
            step="eager" if framework == "torch" else "compiled",
        )
        plan = asked.edit(**changes).resolve(machine(), WorkloadDefaults(batch=8, epochs=1))
        return Task(workload=Workload.parse(self.workload), plan=plan, machine=machine())

    def built(self, library: str, *layout: str) -> tuple[Any, Any]:
        """The model and its loss as ``workloads/*/LIBRARY.py`` has them; needs no data."""
        workload = Workload.parse(self.workload)
        module = network(workload.name, library)
        return module.model(parameters(workload), CLASSES, *layout), module.loss

    def batch(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Images [n, c, h, w] and labels [n]."""
        draw = np.random.default_rng(self.draw)
        shape = (self.images, self.channels, self.side, self.side)
        images = draw.standard_normal(shape, dtype=np.float32)
        return images, draw.integers(0, CLASSES, self.images)


CASES = (
    Case("digits:samples=36", 8, 1, layouts=LAYOUTS, steps=LAYOUTS),
    Case("mnist", 28, 1, training=False),
    Case("cnn10", 32, 3, layouts=LAYOUTS, images=1, draw=552),
    Case("inception_v3:size=75", 75, 3, training=False, exact=True),
    Case("wide_resnet:depth=10,samples=36,width=1", 32, 3, steps=LAYOUTS[:1]),
)


DISTORTED_SIZE, CANVAS = 75, 128


def boxed() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Pictures in the corners of canvases, and marks: ids, heights and widths."""
    sides = np.array([(20 + 9 * (i % 12), 128 - 5 * (i % 20)) for i in range(24)])
    canvases = np.full((len(sides), CANVAS, CANVAS, 3), 7, np.uint8)
    for row, (height, width) in enumerate(sides.tolist()):
        canvases[row, :height, :width] = picture(height, width, row)
    return canvases, np.column_stack([np.arange(len(sides)), sides]).astype(np.uint32)


def augmented_arrays() -> tuple[DataSetArrays, npt.NDArray[np.uint32]]:
    """Images of three channels that are not square, and the ids of their samples."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (50, 9, 8, 3), dtype=np.uint8)
    made = dataclasses.replace(arrays(4), train_images=images, mean=(10.4, 120.5, 255.0))
    return made, draw.integers(0, 60_000, 50).astype(np.uint32)
