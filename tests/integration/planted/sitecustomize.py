"""Plants one fault in one rank of a run: Python imports this module when it starts.

NFOLD_PLANT is ``ACTION:RANK:STEP``. Only a rank's own process (RANK is set) is changed: its
training step does the action when it comes to the step, with the real thing, not a pretended
exception: a real allocation that fails, a real NaN, a real exception of the user's code.
"""

import os
import time


def _plant(action: str, at_step: int) -> None:
    import torch

    from nfold.engines.torch.trainer import Trainer

    honest = Trainer.step
    made = 0

    def step(self, batch):  # type: ignore[no-untyped-def]
        nonlocal made
        made += 1
        if made == at_step and action == "oom":
            torch.empty(2**50)
        if made == at_step and action == "raise":
            raise ValueError("planted in the user's own code")
        if made == at_step and action == "leave":
            os._exit(7)
        if made >= at_step and action == "sleep":
            time.sleep(0.1)
        loss = honest(self, batch)
        return loss * float("nan") if made >= at_step and action == "nan" else loss

    Trainer.step = step  # type: ignore[method-assign]


if "NFOLD_PLANT" in os.environ and "RANK" in os.environ:
    _action, _rank, _step = os.environ["NFOLD_PLANT"].split(":")
    if os.environ["RANK"] == _rank:
        _plant(_action, int(_step))
