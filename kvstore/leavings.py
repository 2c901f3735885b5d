"""What a collection finds: values, one a finding."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "inflight": "an extent that was being written when its writers died",
    "reference": "a hint that leads nowhere",
    "quarantined": "a damaged extent that was moved out of the way",
    "trash": "a removed folder whose bytes were not freed",
    "temporary": "an object whose writing was cut off",
}
"""Kinds of leavings, and what they mean; these names are stable."""


@dataclass(frozen=True, slots=True, order=True)
class Leaving:
    """Something of no use any more.

    Attributes:
        path: relative to the store's root.
        kind: one of :data:`KINDS`.
        nbytes: what it takes.
        age: seconds since anything in it changed.
        error: why it could not be freed; None: it was, or would be.
    """

    path: str
    kind: str
    nbytes: int
    age: float
    error: str | None = None
