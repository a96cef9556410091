"""Measurements with exact times, for tests that compute what must come out by hand."""

from __future__ import annotations

from typing import Any

from made import machine, plan
from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.workload import Workload


def windows(seconds: list[float], samples: int = 100, steps: int = 10) -> tuple[Window, ...]:
    """One window of ``steps`` steps and ``samples`` samples for each of ``seconds``."""
    return tuple(Window(start_s=0.0, seconds=s, steps=steps, samples=samples) for s in seconds)


def rank(number: int = 0, seconds: list[float] | None = None, **more: Any) -> RankSamples:
    """One rank whose windows took ``seconds``, none by default."""
    return RankSamples(rank=number, device=f"cpu:{number}", windows=windows(seconds or []), **more)


def timed(
    *seconds: list[float], workload: str = "digits", cores: int = 2, gpus: int = 0, **more: Any
) -> Measurement:
    """A measurement whose rank k had windows of ``seconds[k]``; ``more`` is plan or measurement."""
    own = {k: more.pop(k) for k in list(more) if k in Measurement.__dataclass_fields__}
    host = own.pop("machine", None) or machine(cores=cores, gpus=gpus)
    complete = plan(host, **more)
    facts: dict[str, Any] = {"id": "made", "status": "ok", **own}
    facts.setdefault("ranks", tuple(rank(k, s) for k, s in enumerate(seconds)))
    return Measurement(workload=Workload.parse(workload), plan=complete, machine=host, **facts)
