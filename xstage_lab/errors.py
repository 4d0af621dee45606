"""What can go wrong, said so that the reader knows what to do.

Every exception names the field, the value, the unit, the allowed range and the way out. All of
them are also ``ValueError``, so that callers who know nothing of this package still catch them.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any


class XStageError(ValueError):
    """Base of every error the lab raises on bad input or a missing part."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross from worker processes; the default would call __init__ with the text alone.
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[XStageError], text: str, fields: dict[str, Any]) -> XStageError:
    error = kind.__new__(kind)
    error.args = (text,)
    error.__dict__.update(fields)
    return error


class InvalidValue(XStageError):
    """A field holds a value outside what it may hold."""

    def __init__(
        self, field: str, value: object, allowed: str, unit: str = "", remedy: str = ""
    ) -> None:
        self.field, self.value, self.allowed, self.unit = field, value, allowed, unit
        of_unit = f" {unit}" if unit else ""
        text = f"{field} = {value!r}{of_unit} is not possible; allowed: {allowed}{of_unit}."
        super().__init__(f"{text} {remedy}".rstrip())


class UnknownName(XStageError):
    """A name that is in no table; says which names are nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        lower = {k.lower(): k for k in self.known}
        near = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(lower[n] for n in near)}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}: {hint}Known: {', '.join(self.known)}.")


class UnknownFact(XStageError):
    """A number that nobody published and nobody entered, and that is needed here."""

    def __init__(self, field: str, of: str, remedy: str) -> None:
        self.field, self.of = field, of
        super().__init__(f"{field} of {of} is not known: {remedy}")


class Infeasible(XStageError):
    """A configuration the machine cannot run, with the limit that excludes it."""


class FileRejected(XStageError):
    """A file that cannot be read as what it should be; names file, place and reason."""

    def __init__(self, path: object, reason: str, where: str = "") -> None:
        self.path, self.reason, self.where = path, reason, where
        super().__init__(f"{path}{f', {where}' if where else ''}: {reason}")


class DeviceUnavailable(XStageError):
    """A device that cannot work on this computer; says what is missing and what to do."""


class NotMeasured(XStageError):
    """A recorded device was asked for a run that nobody recorded."""


class WorkerFailed(XStageError):
    """The process that measured ended before its work did."""


class DeviceLost(WorkerFailed):
    """The process that measured cannot use its device any more; only a new process can."""


def require_number(
    field: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    unit: str = "",
    open_low: bool = False,
    integer: bool = False,
    remedy: str = "",
) -> None:
    """Raise unless `value` is a finite number in the range.

    Parameters
    ----------
    field, unit, remedy : str
        Named in the message.
    low, high : float
        Bounds, both included unless `open_low` excludes `low`.
    integer : bool
        Whether only whole numbers are allowed.

    Raises
    ------
    InvalidValue
        Naming field, value, unit, range and remedy.
    """
    above = "above" if open_low else "from"
    if math.isinf(low):
        allowed = "any finite number" if math.isinf(high) else f"up to {high:,.10g}"
    else:
        allowed = f"{above} {low:,.10g}" + ("" if math.isinf(high) else f" to {high:,.10g}")
    if integer:
        allowed = f"whole numbers {allowed}"
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if good:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        good = math.isfinite(number) and low <= number <= high
        good = good and not (open_low and number == low)
        good = good and not (integer and number != int(number))
    if not good:
        raise InvalidValue(field, value, allowed, unit, remedy)


def require_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise `UnknownName` unless `value` is one of `choices`."""
    known = tuple(choices)
    if value not in known:
        raise UnknownName(field, str(value), known)
