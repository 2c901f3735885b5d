"""What a verification finds: values, one a finding."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = {
    "record": "a record is not valid: of the store, a namespace, a layer group or a fan-out folder",
    "extent": "an extent's record is not valid, or stands in another place than it says",
    "version": "a record needs a newer release; nothing says that it is damaged",
    "missing": "something that must be there is not",
    "size": "a shard has more or fewer bytes than its extent's record says",
    "index": "a shard's index is damaged, or contradicts its extent's record",
    "checksum": "a chunk does not match its checksum: the cache in it is damaged",
    "padding": "bytes between chunks are not zero: the cache is whole, yet something changed bytes",
    "chain": "an extent and the one before it in the sequence contradict each other",
    "stray": "a name that the format does not know",
    "unreadable": "the medium or the permissions do not let it be read",
}
"""Kinds of faults, and what they mean."""

NOTES = {
    "gap": "the extent before it is gone, so no lookup gets as far as this one",
    "reference": "a hint that leads nowhere; lookups see that",
    "inflight": "an extent that is being written, or whose writers died",
    "unfinished": "something whose making stopped half way; nothing depends on it",
    "quarantined": "an extent that a load found damaged and moved out of the way",
    "trash": "a removed folder whose bytes are not freed yet",
}
"""Kinds of notes: worth knowing, nothing wrong."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One finding.

    Attributes:
        path: what is concerned, relative to the store's root; empty: the store.
        kind: one of :data:`FAULTS` or of :data:`NOTES`; these names are stable.
        message: what is wrong with it.
    """

    path: str
    kind: str
    message: str

    @property
    def is_note(self) -> bool:
        """Whether nothing is wrong, and it is only worth knowing."""
        return self.kind in NOTES
