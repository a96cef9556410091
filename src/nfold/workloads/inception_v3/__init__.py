"""Inception-v3 on photographs with its published distortions."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.core.plan import WorkloadDefaults
from nfold.workloads.inception_v3.architecture import (
    AUXILIARY,
    AUXILIARY_GRID_SIDE,
    BODY,
    TOP,
    multiplications,
    output_shape,
)
from nfold.workloads.workload_info import PEAK_RATE, TRAIN_SAMPLES, WorkloadInfo, WorkloadParameter

CLASSES = 1000
# Of the auxiliary head in the loss, as in Google's training code of 2016 (inception_model.py)
AUXILIARY_WEIGHT = 0.4
LABEL_SMOOTHING = 0.1  # of the labels (section 7 of the paper)
LEARNING_RATE = 0.045  # the paper's (section 8)
WEIGHT_DECAY = 4e-5  # as in Google's published training code
MIN_SIDE = 75  # pixels of the smallest image that leaves a grid for the last blocks


def flop_per_sample(parameters: Mapping[str, int]) -> float:
    """Count the operations per sample: forward, and twice that backward."""
    images = (3, parameters["size"], parameters["size"])
    grid = output_shape(BODY, images)
    total = sum(multiplications(BODY, images)) + sum(multiplications(TOP, grid))
    total += output_shape(TOP, grid)[0] * parameters["classes"]
    if parameters["aux"]:
        pooled = (grid[0], AUXILIARY_GRID_SIDE, AUXILIARY_GRID_SIDE)
        total += sum(multiplications(AUXILIARY, pooled))
        total += output_shape(AUXILIARY, pooled)[0] * parameters["classes"]
    return 3 * 2 * total


INFO = WorkloadInfo(
    name="inception_v3",
    summary="Inception-v3 on JPEG photographs with its published distortions: 27.2 M parameters",
    source=(
        "C. Szegedy and others, Rethinking the Inception Architecture for Computer Vision "
        "(arXiv:1512.00567, 2015); distortions as in Google's training code of 2016 "
        "(image_processing.py); data: a folder per class, or Parquet with JPEGs"
    ),
    dataset="photographs",
    training_samples=1_281_167,
    parameters={
        "size": WorkloadParameter(default=299, help="pixels of an image's side", minimum=MIN_SIDE),
        "classes": WorkloadParameter(
            default=CLASSES, help="classes that the labels are of", minimum=2
        ),
        "aux": WorkloadParameter(
            default=1, help="1: with the auxiliary head", minimum=0, maximum=1
        ),
        "repeat": WorkloadParameter(default=1, help="times that an epoch has every photograph"),
        "samples": TRAIN_SAMPLES,
        "peak": PEAK_RATE,
    },
    defaults=WorkloadDefaults(batch=32, epochs=1, encoded=True),
    flop_per_sample=flop_per_sample,
)
