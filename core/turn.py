"""One turn of the engine's loop: a step is launched while the one before it runs, and that one is then taken in."""
from __future__ import annotations

import threading
from typing import NamedTuple

from .plan import Batch, Out
from .scheduler.outputs import StepOutputs
from .scheduler.plans import Plan
from .scheduler.scheduler import Scheduler
from .scheduler.times import DEVICE, FINISH, StepTimes


class Flight(NamedTuple):
    """A step that was launched and not taken in."""

    plan: Plan
    out: Out


class Turn:
    """Takes in the step before once: when a mask of the launched one needs its tokens, else at the end of the turn.

    outputs: of that step, None when there was none. error: what it failed with on the device.
    """

    def __init__(self, scheduler: Scheduler, times: StepTimes, before: Flight | None):
        self._scheduler, self._times, self.before = scheduler, times, before
        self.outputs: StepOutputs | None = None
        self.error: Exception | None = None
        self._fault: BaseException | None = None
        self._thread, self._landed = threading.get_ident(), threading.Event()

    def masked(self, batch: Batch, late: bool) -> Batch:
        """The batch with a mask that can be waited for, or filled already. late: the platform takes such masks."""
        mask = batch.sampling.mask
        if mask is None:
            return batch
        if not self._scheduler.masks.late:
            self._scheduler.fill_masks()
        elif late:
            return batch._replace(sampling=batch.sampling._replace(mask=mask._replace(ready=self.ready)))
        else:
            self.land()
        return batch

    def ready(self) -> None:
        """`Mask.ready` of the launched step."""
        if threading.get_ident() != self._thread:
            self._landed.wait()
        elif not self._landed.is_set():
            self._take_in()
            self._times.enter(DEVICE)

    def land(self) -> None:
        """Take in the step before and fill the masks, unless that was done."""
        if not self._landed.is_set():
            self._take_in()
        if self._fault is not None:  # a platform that called `ready` may have taken it for its own
            raise self._fault

    def release(self) -> None:
        """Whatever has happened, let nobody wait any more."""
        if not self._landed.is_set():
            self._scheduler.masks.give_up()
            self._landed.set()

    def _take_in(self) -> None:
        try:
            if self.before is not None:
                self._collect(self.before)
            if self.error is None:
                self._scheduler.fill_masks()
        except BaseException as error:
            self._fault = error
            raise
        finally:
            self._scheduler.masks.give_up()  # what is not filled by now
            self._landed.set()

    def _collect(self, before: Flight) -> None:
        self._times.enter(DEVICE)
        try:
            result = before.out.collect()
        except Exception as error:
            self.error = error
            return
        self._times.enter(FINISH)
        self.outputs = self._scheduler.settle(before.plan, result)
