"""A run's memory on a GPU, measured by a process that does nothing else. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.contract.child import Child
from paceline.contract.interpreter import python
from paceline.contract.records import MemoryStages, StageRecord
from paceline.machine.facts import Gpu, ask
from paceline.recipe import Recipe

COMMAND: Final = tuple(python("-m", "paceline.memory.stages"))
MIB: Final = 2**20

ENDING_SECONDS: Final = 10.0
"""How long a process that has said all may take to end by itself."""


def measure(
    recipe: Recipe,
    *,
    others: int | None = None,
    heard: Callable[[StageRecord], None] = lambda _: None,
    command: Sequence[str] = COMMAND,
) -> MemoryStages:
    """The stages of a run's first steps, see ``stages.measure_stages``; whatever stops them is told in the result.

    A process a run: the context, the kernels that are loaded and the allocator's caches are part of what is measured.

    Args:
        recipe: as ``choose`` made it for this machine.
        others: bytes of the GPU that other programs have taken.
        heard: told of each stage as it ends.
        command: the program that measures.
    """
    loop, stages = recipe.loop, list[StageRecord]()
    child = Child(command)
    try:
        child.ask({"recipe": recipe.plain(), "others": others})
        while "stage" in (told := child.answer()):
            stages.append(StageRecord(**told["stage"]))
            heard(stages[-1])
        child.wait(ENDING_SECONDS)
        child.kill()  # also what it forked
        code, printed = child.wait(), child.printed()
    finally:
        child.kill()
        child.close()
    found = told.get("steady") or {"micro_batch_size": loop.micro_batch_size or loop.batch_size}
    problem, trace = _problem(told, code or 0, printed)
    return MemoryStages(
        **found, stages=tuple(stages), others=others, batch_size=loop.batch_size, problem=problem, traceback=trace
    )


def taken_by_others(gpu: Gpu) -> int | None:
    """Bytes of the GPU in use before this program has anything there, by NVML; None where nobody tells."""
    answer = ask(["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"])
    for line in (answer or "").splitlines():
        uuid, _, used = line.partition(",")
        if uuid.strip() == gpu.uuid and used.strip().isdecimal():
            return int(used) * MIB
    return None


def _problem(told: Mapping[str, Any], code: int, printed: str) -> tuple[str, str]:
    """What stopped it, and the traceback where that is a bug's; nothing where it went to its end."""
    if "steady" in told:
        return "", ""
    if "out_of_memory" in told:
        return f"out of memory in the stage {told['out_of_memory']!r}: {told['message']}", ""
    if "problem" in told:
        return told["problem"], told.get("traceback", "")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process that measures ended without an answer ({how})", printed
