"""How much of the noise between equal processes cancels if two of them alternate every second.

Both train the same perceptron. Either one runs after the other, as in ``nfold tune``, or both live
and one is stopped while the other trains. Printed is the standard deviation of the logarithm of the
ratio of their step times, which is 0 without noise. CPU only: a stopped process holds its GPU memory.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

SLICE_S, RUN_S = 1.0, 4.0
SETTLE_S = 0.1  # after a slice begins
WARM_UP_STEPS = 50
TRAINING = """
import sys, time, torch
from torch.nn import Linear, ReLU, Sequential, functional
torch.manual_seed(0)
torch.set_num_threads(2)
x, y = torch.randn(128, 256), torch.randint(10, (128,))
model = Sequential(Linear(256, 512), ReLU(), Linear(512, 512), ReLU(), Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        file.write(f"{time.monotonic()}\\n")
"""


class Training:
    """A process that trains until it is ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")
        self._process = subprocess.Popen([sys.executable, "-c", TRAINING, str(file)])
        while len(self._times()) < WARM_UP_STEPS:
            time.sleep(0.1)
        self.stop()

    def train(self, seconds: float) -> tuple[float, float]:
        """Train for some seconds, then stop; return when."""
        self._process.send_signal(signal.SIGCONT)
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self.stop()
        return start + SETTLE_S, end

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def log_step_s(self, start: float, end: float) -> float:
        """Return the logarithm of the mean seconds of the steps between two times."""
        inside = [one for one in self._times() if start < one < end]
        return math.log((inside[-1] - inside[0]) / (len(inside) - 1))

    def _times(self) -> list[float]:
        return [float(line) for line in self._file.read_text().split("\n")[:-1]]


def alternating(folder: Path, slices: int) -> float:
    """Return the mean log ratio of two processes that alternate, in the order ABBA."""
    both = [Training(folder / name) for name in "ab"]
    windows = []
    for number in range(slices):
        order = (0, 1) if number % 2 else (1, 0)
        windows.append({index: both[index].train(SLICE_S) for index in order})
    for one in both:
        one.end()
    first, second = (
        [both[index].log_step_s(*window[index]) for window in windows] for index in (0, 1)
    )
    return fmean(first) - fmean(second)


def one_run(folder: Path) -> float:
    training = Training(folder / "a")
    window = training.train(RUN_S)
    training.end()
    return training.log_step_s(*window)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--slices", type=int, default=10, help="of each process of a pair")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alternated, sequential = [], []
        for _ in range(asked.pairs):
            alternated.append(alternating(folder, asked.slices))
            sequential.append(one_run(folder) - one_run(folder))
    for name, ratios, training_s in (
        ("alternating", alternated, 2 * asked.slices * SLICE_S),
        ("one after the other", sequential, 2 * RUN_S),
    ):
        deviation = math.sqrt(fmean(one * one for one in ratios))
        print(f"{name}: {deviation:.3f} in {training_s:.0f} s of training and two starts")


if __name__ == "__main__":
    main()
