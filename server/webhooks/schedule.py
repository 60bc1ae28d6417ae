"""When to try again: soon at first, then over about a day.

Knows: how often something was tried. Does not know: what.
"""

import random

DELAYS_SECONDS = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 36_000.0)
JITTER = 0.2


def next_delay_seconds(tries: int) -> float | None:
    """Seconds until the next try after so many failed ones; None: give up.

    Up to a fifth longer by chance, so that a receiver that comes back is not met by everything at once.
    """
    if tries > len(DELAYS_SECONDS):
        return None
    return DELAYS_SECONDS[tries - 1] * random.uniform(1.0, 1.0 + JITTER)
