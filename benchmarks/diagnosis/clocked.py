"""A script as it is, with the time at the beginning of every line that it prints.

    torchrun --nproc-per-node 4 benchmarks/diagnosis/clocked.py scripts/cifar_ddp.py --epochs 16

What nfold says of an epoch is held against that.
"""

from __future__ import annotations

import builtins
import runpy
import sys
import time
from pathlib import Path
from typing import Any

usual = print


def timed(*words: Any, **how: Any) -> None:
    usual(f"{time.perf_counter():.4f}", *words, **how, flush=True)


if __name__ == "__main__":
    builtins.print = timed
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
