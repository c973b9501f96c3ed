"""Where the time of a step goes, in the three parts that `isthmus top` and the dashboard show."""
from __future__ import annotations

import time

SCHEDULE, DEVICE, FINISH = "schedule", "device", "finish"
PARTS = (SCHEDULE, DEVICE, FINISH)


class StepTimes:
    """Seconds spent in each part, summed; they only grow. A measurement: nothing is ever decided by it.

    schedule: planning and building the batch. device: launching a step and waiting for one; what the host does
    meanwhile, thanks to overlap, is counted where it is done. finish: taking in a step's result.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0

    def enter(self, part: str | None) -> None:
        """From now on time counts for `part`; None: for nobody."""
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def reset(self) -> None:
        """Count from zero again."""
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def snapshot(self) -> dict[str, float]:
        """`step_schedule_seconds` and its like."""
        return {f"step_{part}_seconds": seconds for part, seconds in self.seconds.items()}
