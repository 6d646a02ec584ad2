"""The boundary of a confidence sequence: how far an estimate may stray at any look.

A fixed-sample interval covers with 95 % at one planned end. Looking at it again and again and
stopping when it excludes zero gives far more than 5 % of false alarms. A confidence sequence covers
with 95 % at all looks together.

Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, "Time-uniform central limit theory and
asymptotic confidence sequences", Annals of Statistics 52(6), theorem 2.2 and section 2.4.
"""

from __future__ import annotations

import math


def boundary(time: float, rho: float, alpha: float = 0.05) -> float:
    """Returns the half-width of the confidence sequence, in standard errors of the estimate.

    Args:
        time: Observations so far, or information (one over the squared standard error).
        rho: Where the sequence is tightest; see `tuned_rho`.
        alpha: Share of runs in which the truth may leave the sequence at any time.
    """
    scaled = time * rho**2
    width = 2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / alpha)
    return math.sqrt(width)


def tuned_rho(time: float, alpha: float = 0.05) -> float:
    """Returns the rho whose sequence is tightest after that time (section 2.4)."""
    log = -2 * math.log(alpha)
    return math.sqrt((log + math.log(log + 1)) / time)
