"""Counting loss spikes: losses far above those just before, by a scale that the spikes themselves do not move."""

import math
from collections import deque
from statistics import median

NORMAL_SCALE = 1.4826  # the standard deviation of normal noise over its median absolute deviation (MAD)


class LossSpikes:
    """Counts losses with x > m + k max(1.4826 MAD, f |m|), m the median and MAD that of the `window` losses before x.

    A loss that is not finite is a spike too, and is left out of the window. Nothing is judged before `least` losses
    are there. Other losses enter the window whether they are spikes or not: a median forgives a few of them, and a
    new level that lasts stops being one.

    Args:
        window: how many losses before it a loss is compared with.
        deviations: k, how many (estimated) standard deviations above the median.
        floor: f, the least deviation as a share of the median, so that a loss that hardly moves does not make spikes.
        least: how many losses must be there first.

    Attributes:
        count: spikes so far.

    Example:
        >>> spikes = LossSpikes(window=5, deviations=6.0, least=5)
        >>> [spikes.add(loss) for loss in (2.0, 2.1, 1.9, 2.0, 2.1, 2.3, 4.0)]  # median 2.0, 1.4826 MAD 0.148
        [False, False, False, False, False, False, True]
        >>> spikes.count
        1
    """

    def __init__(self, window: int = 50, deviations: float = 6.0, floor: float = 0.01, least: int = 10) -> None:
        if not 1 <= least <= window:
            raise ValueError(f"least {least}: it must be 1 to the window of {window} losses")
        self.deviations, self.floor, self.least = deviations, floor, least
        self.recent: deque[float] = deque(maxlen=window)
        self.count = 0

    def add(self, loss: float) -> bool:
        """Takes the next loss and says whether it is a spike."""
        spike = not math.isfinite(loss)
        if not spike and len(self.recent) >= self.least:
            middle = median(self.recent)
            deviation = NORMAL_SCALE * median(abs(value - middle) for value in self.recent)
            spike = loss > middle + self.deviations * max(deviation, self.floor * abs(middle))
        if math.isfinite(loss):
            self.recent.append(loss)
        self.count += spike
        return spike
