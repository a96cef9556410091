"""Determine the status, root cause and caveats of a run from its files and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import cast

from nfold.core.measurement import Caveat, FailureCause, RankSamples, Status
from nfold.core.stats import change_point, median
from nfold.core.variant import Variant
from nfold.engines.base import Phase
from nfold.engines.recorder import MIN_WINDOWS
from nfold.launch.handoff import HandoffFolder, RankFailure
from nfold.launch.rank_lifecycle import find_current_call
from nfold.launch.supervisor import TreeExit
from nfold.launch.training_checks import (
    SKIP_TOGETHER,
    check_same_order,
    describe_skipped_batches,
    training_caveats,
)

AGENT_EXIT_CODES = (-signal.SIGTERM,)  # of ranks that torchelastic stops because another failed
SAME_STEPS = "next: equal numbers of steps on all ranks, and no collective on one rank alone"
HANG_TIMEOUT_HINT = "next: if the rank was only busy, a longer --hang-timeout SECONDS"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, and the samples of its ranks.

    ``cause`` is the root cause, ``failures`` are those of all ranks by time, ``detached`` the
    processes that a script left running: id and command.
    """

    status: Status
    cause: FailureCause | None = None
    ranks: tuple[RankSamples, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    leftover_pids: tuple[int, ...] = ()
    detached: tuple[tuple[int, str], ...] = ()
    folder: Path = Path()
    energy_joules: float | None = None
    caveats: tuple[Caveat, ...] = ()


def read_outcome(folder: HandoffFolder, ending: TreeExit, processes: int) -> Outcome:
    """Return the outcome of a run of ``processes`` ranks from its folder and how its tree ended."""
    ranks, failures = folder.reports.read_samples(), folder.reports.read_failures()
    exits = folder.agent.read_exit_codes()
    status, cause = determine_status(ending, failures, exits, len(ranks), processes)
    if cause is not None and not ending.is_hung_rank_stopped:
        places = rank_places(folder, ranks, failures)
        if has_collective_mismatch(folder, cause) or are_out_of_step(
            status, cause, places, failures
        ):
            skipped = describe_skipped_batches(ranks)
            where = "; ".join([*(place.text for place in places), *([skipped] if skipped else [])])
            text = f"ranks are out of step: {where}; {SKIP_TOGETHER if skipped else SAME_STEPS}"
            cause = replace(cause, text=text, out_of_step=True)
            status = "hung" if status == "unsupported" else status
    return Outcome(
        status=status,
        cause=cause,
        ranks=_with_peaks(ranks, failures),
        failures=tuple(failures),
        exit_codes=exits,
        leftover_pids=ending.leftover_pids,
        detached=ending.detached,
        folder=folder.path,
    )


# Functions of PyTorch in which a rank waits for others.
WAITING_CALLS = re.compile(
    r"(forward|backward|barrier|monitored_barrier|broadcast\w*|all_\w+|reduce\w*|gather\w*|scatter\w*"
    r"|send|recv|wait|synchronize) \("
)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank was when its run ended: the line or call, empty if unknown, and its steps.

    ``needs_others``: it waited for other ranks there, or has left them.
    """

    rank: int
    step: int
    location: str = ""
    has_left: bool = False
    needs_others: bool = False

    @property
    def text(self) -> str:
        """``rank 0 is in all_reduce (train.py:54) after step 102``."""
        where = f"is in {self.location}"
        if self.has_left:
            where = (
                f"has left its training loop at {self.location}" if self.location else "has ended"
            )
        return f"rank {self.rank} {where} after step {self.step}"


def rank_places(
    folder: HandoffFolder, ranks: Sequence[RankSamples], failures: Sequence[RankFailure]
) -> list[RankPlace]:
    """Return the places of all ranks of this node that are known."""
    left = {samples.rank: samples.left_at for samples in ranks}
    failed = {failure.rank: failure for failure in failures}
    found = []
    for rank, beat in folder.reports.read_heartbeats().items():
        stack = folder.stack_file(rank)
        location = find_current_call(stack) or ""
        # Ended by an error that it had no time to report.
        has_left = not location and stack.exists() and stack.stat().st_size > 0
        waits = WAITING_CALLS.match(location) is not None
        if rank in failed:
            location, has_left = failed[rank].location, failed[rank].has_left
            waits = failed[rank].collateral
        elif (left_at := left.get(rank)) is not None:
            location, has_left = left_at, True
        elif beat.is_inferred and beat.phase == Phase.FINISHED:
            location, has_left = "", True
        if location or has_left:
            found.append(
                RankPlace(
                    rank=rank,
                    step=beat.step,
                    location=location,
                    has_left=has_left,
                    needs_others=waits or has_left,
                )
            )
    return found


# Of gloo and NCCL before they abort a process: ranks are in different collectives, or in none.
COLLECTIVE_MISMATCH = re.compile(
    rb"op\.preamble\.length <= op\.nbytes|Watchdog caught collective operation timeout"
)
LOG_TAIL_BYTES = 65_536


def has_collective_mismatch(folder: HandoffFolder, cause: FailureCause) -> bool:
    """Return whether a rank aborted because the others were not in the same collective."""
    if cause.signal != signal.SIGABRT or cause.rank is None:
        return False
    log = folder.rank_log(cause.rank)
    tail = log.read_bytes()[-LOG_TAIL_BYTES:] if log.exists() else b""
    return COLLECTIVE_MISMATCH.search(tail) is not None


def are_out_of_step(
    status: Status,
    cause: FailureCause,
    places: Sequence[RankPlace],
    failures: Sequence[RankFailure],
) -> bool:
    """Return whether ranks wait for each other in different places.

    That shows as a hang of ranks that all wait for others, as an abort of one of them, or as a rank
    that ends while others need it. A rank that hangs in code of its own is not out of step.
    """
    if len({(place.location, place.has_left) for place in places}) < 2:
        return False
    if status == "killed":
        return cause.signal == signal.SIGABRT and all(place.needs_others for place in places)
    left = [place for place in places if place.has_left]
    alone = all(failure.collateral or failure.has_left for failure in failures)
    if status == "hung":
        return all(place.needs_others for place in places)
    return alone and 0 < len(left) < len(places)


def _with_peaks(
    ranks: Sequence[RankSamples], failures: Sequence[RankFailure]
) -> tuple[RankSamples, ...]:
    kept = {rank.rank: rank for rank in ranks}
    for failure in failures:
        if failure.peak_memory_bytes is not None:
            samples = kept.get(failure.rank, RankSamples(rank=failure.rank, device=""))
            kept[failure.rank] = replace(samples, peak_memory_bytes=failure.peak_memory_bytes)
    return tuple(kept[rank] for rank in sorted(kept))


def determine_status(
    ending: TreeExit,
    failures: Sequence[RankFailure],
    exits: Mapping[int, int],
    measured: int,
    processes: int,
) -> tuple[Status, FailureCause | None]:
    """Return the status of a run and its cause.

    ``failures`` are ordered by time, ``exits`` are exit codes by rank from torchelastic,
    ``measured`` counts the ranks that wrote samples. A rank that was killed or failed by itself is
    the cause, not a rank that failed because it was gone.
    """
    if ending.stop_signal is not None:
        name = signal.Signals(ending.stop_signal).name
        return "interrupted", FailureCause(text=f"nfold got {name}", signal=ending.stop_signal)
    if ending.timed_out is not None:
        seconds, step = ending.timed_out
        text = f"stopped at its {seconds:.0f} s limit after step {step}"
        text += "".join(f"; rank {rank} is in {call}" for rank, call in ending.hung_calls)
        return "interrupted", FailureCause(
            text=text, step=step, stalled_s=ending.seconds_since_step
        )
    if ending.hung is not None:
        rank, step = ending.hung
        stopped = "was stopped by a signal (SIGSTOP)" if ending.is_hung_rank_stopped else ""
        text = f"rank {rank} {stopped or 'made no progress'} after step {step}"
        text += "".join(f"; rank {other} is in {call}" for other, call in ending.hung_calls)
        return "hung", FailureCause(
            text=text, rank=rank, step=step, stalled_s=ending.seconds_since_step
        )
    own = [failure for failure in failures if not failure.collateral]
    if own:
        return _failed(own[0])
    killed = _killed(ending, exits, processes)
    if killed is not None:
        return "killed", killed
    if _exits_without_failure(failures, exits):
        return "crashed", _exit_code_cause(ending, _exits_without_failure(failures, exits))
    if failures:
        return _failed(failures[0])
    if ending.exit_code == 0 and measured == processes:
        return "ok", None
    return "unsupported" if ending.exit_code == 0 else "crashed", _exit_code_cause(ending, exits)


def _exits_without_failure(
    failures: Sequence[RankFailure], exits: Mapping[int, int]
) -> dict[int, int]:
    reported = {failure.rank for failure in failures}
    return {rank: code for rank, code in exits.items() if code > 0 and rank not in reported}


def _failed(failure: RankFailure) -> tuple[Status, FailureCause]:
    cause = FailureCause(text=failure.text, rank=failure.rank, step=failure.step)
    return cast(Status, failure.status), cause


def _killed(ending: TreeExit, exits: Mapping[int, int], processes: int) -> FailureCause | None:
    if processes == 1 and ending.exit_code is not None and ending.exit_code < 0:
        return _signalled("rank 0", -ending.exit_code, rank=0)
    for rank, code in sorted(exits.items()):
        if code < 0 and code not in AGENT_EXIT_CODES:
            return _signalled(f"rank {rank}", -code, rank=rank)
    if ending.exit_code is not None and ending.exit_code < 0:
        return _signalled("the agent", -ending.exit_code, rank=None)
    for rank, code in sorted(exits.items()):
        if code < 0 and all(other == code for other in exits.values()):
            return _signalled(f"rank {rank}", -code, rank=rank)
    return None


def _signalled(who: str, signum: int, rank: int | None) -> FailureCause:
    name = signal.Signals(signum).name
    hint = "; the kernel's out-of-memory killer does this too" if signum == signal.SIGKILL else ""
    return FailureCause(text=f"{who} was ended by {name}{hint}", rank=rank, signal=signum)


def _exit_code_cause(ending: TreeExit, exits: Mapping[int, int]) -> FailureCause:
    failed = {rank: code for rank, code in exits.items() if code != 0}
    rank = min(failed, default=None)
    where = "the agent" if rank is None else f"rank {rank}"
    code = ending.exit_code if rank is None else failed[rank]
    if code == 0:
        return FailureCause(text="the script ended with exit code 0 before it was measured")
    return FailureCause(
        text=f"{where} exited with code {code} and no error message; see its log", rank=rank
    )


SLOW_RANK_FRACTION = 0.10
SLOW_WINDOW_FRACTION = 0.8
DRIFT_FRACTION = 0.05


def rank_caveats(ranks: Sequence[RankSamples], variant: Variant | None = None) -> list[Caveat]:
    """Return the caveats that the samples of the ranks raise about their numbers.

    A variant that does not preserve the training is checked for its times and its epochs only.
    """
    trained = variant is None or variant.preserves_training
    reported = [Caveat(kind=kind, text=text) for rank in ranks for kind, text in rank.caveats]
    found = [
        *(training_caveats(ranks) if trained else (check_same_order(ranks),)),
        check_window_count(ranks),
        check_drift(ranks),
        check_slow_rank(ranks),
    ]
    return [*dict.fromkeys(reported), *(caveat for caveat in found if caveat is not None)]


def check_window_count(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if there are too few timed windows for an interval."""
    if not ranks or any(rank.parts for rank in ranks):
        return None
    count = min(len(rank.windows) for rank in ranks)
    if count >= MIN_WINDOWS:
        return None
    text = f"only {count} timed windows: give more --steps or --epochs for a firm interval"
    return Caveat(kind="few_windows", text=text)


def check_drift(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if the speed jumps by more than 5 % between windows, beyond noise."""
    for rank in ranks:
        found = change_point([w.seconds / w.steps for w in rank.windows])
        if found and abs(found.after / found.before - 1) > DRIFT_FRACTION:
            change = 100 * (found.after / found.before - 1)
            text = f"step time changed by {change:+.0f} % from window {found.index + 1} on"
            return Caveat(kind="drift", text=f"rank {rank.rank}: {text}")
    return None


def check_slow_rank(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if a rank needs more time than the others' median, by 10 % of their steps.

    Ranks that exchange gradients have equal steps: where it was measured, the time that a rank
    waited for the exchange is taken off. Then the rank must be slower in most windows, too.
    """
    steps = {r.rank: median(r.step_ms) for r in ranks if r.step_ms}
    if len(steps) < 2:
        return None
    computing = {r.rank: own for r in ranks if (own := _computing_ms(r))}
    waits_known = computing.keys() == steps.keys()
    times = {rank: median(own) for rank, own in computing.items()} if waits_known else steps
    slowest = max(times, key=lambda rank: times[rank])
    others = median([ms for rank, ms in times.items() if rank != slowest])
    step = median([ms for rank, ms in steps.items() if rank != slowest])
    if times[slowest] - others <= SLOW_RANK_FRACTION * step:
        return None
    text = f"rank {slowest} takes {times[slowest]:.2f} ms a step, the others {others:.2f} ms"
    if waits_known:
        rest = [own for rank, own in computing.items() if rank != slowest]
        windows = zip(computing[slowest], *rest, strict=False)
        if fmean(own > median(more) for own, *more in windows) < SLOW_WINDOW_FRACTION:
            return None
        text = (
            f"rank {slowest} computes {times[slowest]:.2f} ms a step before it exchanges gradients, "
            f"the others {others:.2f} ms, and wait for it"
        )
    return Caveat(kind="slow_rank", text=text)


def _computing_ms(rank: RankSamples) -> list[float]:
    return [
        1e3 * (window.seconds - window.exchange_wait_s) / window.steps
        for window in rank.windows
        if window.exchange_wait_s is not None
    ]
