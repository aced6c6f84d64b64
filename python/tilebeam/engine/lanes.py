"""Samples by the LoRA adapters that they are computed with. A batch has one set of adapters, so sets take turns; those
that wait keep slots and cells, as long as the others find room beside them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tilebeam.engine.request import Request, Sample
from tilebeam.engine.turns import STEPS

Scales = tuple[float, ...]


@dataclass(eq=False)
class Lane:
    """Samples that can share batches.

    Attributes:
        adapters: scales of all adapters.
        queue: samples that wait for a slot.
        running: samples that have one, in order of admission.
        pinning: requests whose pinned prefix is not complete yet, in order.
        steps: of its present turn, as far as they brought its samples on.
    """

    adapters: Scales
    queue: deque[Sample] = field(default_factory=deque)
    running: list[Sample] = field(default_factory=list)
    pinning: list[Request] = field(default_factory=list)
    steps: int = 0

    @property
    def busy(self) -> bool:
        """Return whether samples run or wait."""
        return bool(self.queue or self.running)

    @property
    def recovers(self) -> bool:
        """Return whether the sample admitted first still decodes what had cells before, which it gave up. If such steps
        counted, it might give them up again and again and never draw a token."""
        first = self.running[0] if self.running else None
        return first is not None and first.kv is not None and len(first.kv) < first.reached


class Lanes:
    """The sets of adapters that samples want.

    Attributes:
        current: the one whose turn it is.
    """

    def __init__(self, adapters: Scales) -> None:
        self.current = Lane(adapters)
        self._others: dict[Scales, Lane] = {}  # in the order in which their turns come

    @property
    def all(self) -> list[Lane]:
        """The current one and the others. Any thread may ask."""
        return [self.current, *self.others]

    @property
    def others(self) -> list[Lane]:
        """Those whose turn comes, in this order."""
        return list(self._others.values())

    def of(self, request: Request) -> Lane:
        """Return the lane of a request."""
        if request.adapters == self.current.adapters:
            return self.current
        return self._others.setdefault(request.adapters, Lane(request.adapters))

    def turn(self) -> Lane:
        """Return the lane of the next step, which is made. A turn ends after some steps, or with nothing left to do."""
        before = self.current
        if self._others and (before.steps >= STEPS or not before.busy):
            self._others = {lane.adapters: lane for lane in [*self.others, before] if lane.busy}
            if self._others:
                self.current = self._others.pop(next(iter(self._others)))
                self.current.steps = 0
        self.current.steps += not self.current.recovers
        return self.current
