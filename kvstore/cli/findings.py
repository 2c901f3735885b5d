"""What ``kvstore doctor`` finds: values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "lacking", "failed", "info"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: stable short name.
        state: ``ok``; ``lacking``: a store works, with less; ``failed``: no store can work;
            ``info``: nothing to judge.
        detail: what was found.
        advice: what to do about it; None: nothing.
    """

    name: str
    state: State
    detail: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and what follows from them.

    Attributes:
        checks: the findings.
        engine: name of the I/O engine that a store in the folder would use.
        reason: why that one.
    """

    checks: list[Check]
    engine: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether a store can work in the folder."""
        return all(c.state != "failed" for c in self.checks)
