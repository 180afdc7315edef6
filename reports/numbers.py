"""Numbers as words on a page. Rounding never turns something into nothing, nor almost everything into everything.

A rate is "0 %" only if nothing was counted and "100 %" only if all was; two numbers that differ are written so that they differ; a share of
a bound above 1 is never written as 1.
"""

from __future__ import annotations

import math
import time
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

NONE = "–"


def count(value: float) -> str:
    """1234567 -> 1,234,567."""
    return f"{int(value):,}"


def plural(number: float, word: str, words: str = "") -> str:
    """1 finding, 2 findings."""
    return f"{count(number)} {word if int(number) == 1 else words or word + 's'}"


def rate(part: int, whole: int) -> str:
    """part / whole in percent, with as many digits as keep it off 0 and off 100."""
    if whole <= 0:
        return NONE
    if part <= 0:
        return "0 %"
    if part >= whole:
        return "100 %"
    percent = 100 * Decimal(part) / Decimal(whole)
    nearest = min(percent, 100 - percent)  # distance to the nearer end, which must stay visible
    if nearest < Decimal("0.0001"):
        return "<0.0001 %" if percent < 50 else ">99.9999 %"
    digits = max(1, 1 - nearest.adjusted())  # two significant digits of that distance
    rounding = ROUND_FLOOR if percent > 50 else ROUND_CEILING
    text = f"{percent:.{digits}f}"
    if float(text) in (0.0, 100.0):
        text = str(percent.quantize(Decimal(1).scaleb(-digits), rounding=rounding))
    return f"{text} %"


def value(number: float, digits: int = 6) -> str:
    """A float with `digits` significant digits; not 0 unless it is."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return f"{number:.{digits}g}"


def pair(a: float, b: float) -> tuple[str, str]:
    """Both numbers with the same number of digits, and enough of them to tell one from the other."""
    for digits in (6, 9, 12, 17):
        if value(a, digits) != value(b, digits) or a == b:
            return value(a, digits), value(b, digits)
    return value(a, 17), value(b, 17)


def difference(found: float, expected: float) -> str:
    """|found - expected| to three digits, in words where it is no number."""
    if math.isnan(found) or math.isnan(expected):
        return "not a number"
    gap = abs(found - expected)
    if gap == 0.0 and math.copysign(1.0, found) != math.copysign(1.0, expected):
        return "the sign of zero"
    return value(gap, 3)


def share(number: float) -> str:
    """A share of the bound: 0.41, 31, 1.00002; never 1 for what is above it, nor 0 for what is above that."""
    if math.isnan(number) or math.isinf(number):
        return "∞"
    for digits in (2, 3, 5, 9, 17):
        text = f"{number:.{digits}g}"
        if float(text) != 1.0 or number == 1.0:
            break
    return _plain(text)


def times(number: float) -> str:
    """'31 × the bound'; 'beyond any bound' for a failed exact check and for what is not finite."""
    return "beyond any bound" if not math.isfinite(number) else f"{share(number)} × the bound"


def _plain(text: str) -> str:
    """No exponent where a few digits say it better."""
    number = float(text)
    return text if not 1_000 <= abs(number) < 1e9 else f"{number:,.0f}"


def below(trials: int, confidence: float = 0.95) -> str:
    """Upper limit of a rate of which 0 events were seen in `trials`: exact binomial, 1 - (1 - confidence)^(1/trials); rounded up."""
    limit = -math.expm1(math.log1p(-confidence) / trials)
    return (
        str(Decimal(100 * limit).quantize(Decimal(1).scaleb(Decimal(100 * limit).adjusted() - 1), rounding=ROUND_CEILING).normalize())
        + " %"
    )


def duration(seconds: float) -> str:
    """84 ms, 3.2 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 0 or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 or seconds == 0 else "under 1 ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def day(seconds: float) -> str:
    """2026-11-29, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds)) if seconds > 0 else NONE


def when(seconds: float) -> str:
    """2026-11-29 16:20 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds > 0 else NONE
