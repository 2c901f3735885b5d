"""What one rank's process is told, and what it answers: JSON texts, nothing else crosses over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvstore.demo.placement import PageStyle
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.parallel import ParallelConfig, Rank

SESSION = "demo"


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What identifies the cache of a demonstration: the arguments of its namespace.

    Attributes:
        model: the model's name.
        weights_digest: SHA-256 of its weights, as hex.
        layers: layers of the model.
        heads: KV heads.
        head_size: elements of a key, and of a value.
        element: element type.
        block_tokens: tokens of a block.
    """

    model: str
    weights_digest: str
    layers: int
    heads: int
    head_size: int
    element: str
    block_tokens: int

    def identity(self, writer: str) -> Identity:
        """The namespace of what one writer stores; an engine would leave the writer out.

        Each writer gets its own, for in a common one the second would find every extent there
        already, and store nothing.
        """
        group = LayerGroup.attention_kv(
            layers=self.layers,
            heads=self.heads,
            head_size=self.head_size,
            block_tokens=self.block_tokens,
            element=self.element,
        )
        return Identity(
            self.model,
            model_layers=self.layers,
            groups=(group,),
            weights_digest=self.weights_digest,
            variants={"demo-writer": writer},
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part in storing or loading.

    Attributes:
        action: ``store`` or ``load``.
        root: the store.
        facts: what the cache is of.
        writer: the writing side, as text; names the namespace.
        config: the rank's parallel config, as text.
        number: the rank's number in it.
        order: order of the rank's pages.
        parts: arrangement of the parts in a page.
        shape: shape of the rank's pool, ``[layer, block, *page]``.
        pool: file of the pool's bytes; a rank that stores reads it, one that loads makes it.
        tokens: token ids of the prefix.
        blocks: the pool's blocks that hold them, in order.
    """

    action: str
    root: str
    facts: CacheFacts
    writer: str
    config: str
    number: int
    order: str
    parts: str
    shape: tuple[int, ...]
    pool: str
    tokens: list[int]
    blocks: list[int]

    @property
    def style(self) -> PageStyle:
        """The page layout."""
        return PageStyle(self.order, self.parts, self.facts.block_tokens)

    @property
    def parallel(self) -> ParallelConfig:
        """The parallel config."""
        return ParallelConfig.parse(self.config)

    @property
    def rank(self) -> Rank:
        """The rank."""
        return self.parallel.rank(self.number)

    def to_json(self) -> str:
        """The job as a JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        facts = CacheFacts(**fields.pop("facts"))
        return cls(facts=facts, shape=tuple(fields.pop("shape")), **fields)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank's process did.

    Attributes:
        started: monotonic clock of the machine when the work began, in seconds.
        ended: the same when it ended; opening the store and making buffers is outside.
        blocks: leading blocks that were stored or loaded.
        nbytes: content bytes written to the store, or put into the rank's memory.
        troubles: blocks that could not be loaded, with the reason.
    """

    started: float
    ended: float
    blocks: int
    nbytes: int
    troubles: list[str]

    def to_json(self) -> str:
        """The report as a JSON text."""
        return json.dumps(asdict(self))
