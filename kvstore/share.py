"""Shares: which layers, heads and tokens of a layer group one rank of a parallel config holds."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLattice:
    """The tokens of a sequence that one of ``cp`` context-parallel ranks holds.

    Canonical token ``t`` (its place in the sequence) belongs to rank ``(t // interleave) % cp``.
    A rank numbers its own tokens 0, 1, 2 ... in ascending order: its *local* tokens.

    Attributes:
        interleave: tokens in a row on one rank.
        cp: number of context-parallel ranks.
        index: this rank's index among them.

    Raises:
        InvalidArgument: a field is out of range.
    """

    interleave: int = 1
    cp: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if self.interleave < 1 or not 0 <= self.index < self.cp:
            raise InvalidArgument(f"{self} needs interleave >= 1 and 0 <= index < cp")

    @property
    def whole(self) -> bool:
        """Whether every token belongs to this rank."""
        return self.cp == 1

    def before(self, stop: int) -> int:
        """Number of own tokens below canonical token ``stop``."""
        turns, rest = divmod(stop, self.interleave * self.cp)
        own = min(max(rest - self.index * self.interleave, 0), self.interleave)
        return turns * self.interleave + own

    def count(self, start: int, stop: int) -> int:
        """Number of own tokens among canonical tokens ``start`` to ``stop - 1``."""
        return max(self.before(stop) - self.before(start), 0)

    def canonical(self, local: npt.ArrayLike) -> Ints:
        """Canonical tokens of local tokens; same shape."""
        number: Ints = np.asarray(local, dtype=np.int64)
        turn, within = np.divmod(number, self.interleave)
        result: Ints = (turn * self.cp + self.index) * self.interleave + within
        return result

    def local(self, canonical: npt.ArrayLike) -> Ints:
        """Local tokens of canonical tokens, which must be own tokens (not checked); same shape."""
        token: Ints = np.asarray(canonical, dtype=np.int64)
        turn = token // (self.interleave * self.cp)
        result: Ints = turn * self.interleave + token % self.interleave
        return result

    def owned(self, start: int, stop: int) -> Ints:
        """Own tokens among canonical tokens ``start`` to ``stop - 1``, ascending; canonical."""
        # Local numbers have no gaps, so the own tokens of a range are a range of local numbers.
        return self.canonical(np.arange(self.before(start), self.before(stop), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a layer group.

    Attributes:
        layers: positions in ``group.layers``; empty where the rank's stage has none of the group's.
        heads: KV heads.
        lattice: tokens.
        replicas: number of ranks that hold exactly these bytes.
        replica: this rank's index among them.
    """

    layers: range
    heads: range
    lattice: TokenLattice
    replicas: int = 1
    replica: int = 0

    @property
    def empty(self) -> bool:
        """Whether the rank holds nothing of the group."""
        return not self.layers

    def page_bytes(self, group: LayerGroup, tokens: int) -> int:
        """Bytes that the rank holds of one layer's ``tokens`` local tokens."""
        return len(self.heads) * tokens * group.token_bytes


def share_of(group: LayerGroup, config: ParallelConfig, rank: Rank, model_layers: int) -> Share:
    """The share of one rank.

    Heads: TP ranks split them evenly; where TP has more ranks than there are heads, each head is on
    ``tp / heads`` ranks. Tokens: DCP splits them among the TP ranks that hold the same heads, PCP
    among its ranks unless it is ``replicated``. Ranks left with the same bytes are replicas.

    Args:
        group: the layer group. An opaque group's whole share is the one rank's that it names.
        config: the parallel config.
        rank: one of its ranks.
        model_layers: layers of the whole model, which pipeline stages split.

    Raises:
        InvalidArgument: the config has no such rank, or the group has layers beyond the model.
        NotCertified: the group cannot be spread over that config without guessing.
    """
    text = config.describe(rank)
    if group.attention == "opaque":
        if text != group.parallel:
            raise _refusal(
                group, f"it is opaque and belongs to {group.parallel}, not to {text}", config
            )
        return Share(range(group.num_layers), range(group.heads), TokenLattice())
    layers = _layers(group, config.stage(rank.pp, model_layers), model_layers)
    copies = _copies(group, config)
    if copies > 1:
        heads = range(rank.tp // copies, rank.tp // copies + 1)
    else:
        size = group.heads // config.tp
        heads = range(rank.tp * size, (rank.tp + 1) * size)
    replicas = copies // config.dcp
    replica = rank.tp % copies // config.dcp
    if config.pcp_kv == "replicated":
        replica += rank.pcp * replicas
        replicas *= config.pcp
    lattice = TokenLattice(config.interleave, config.cp, config.cp_rank(rank))
    return Share(layers, heads, lattice, replicas, replica)


@lru_cache(maxsize=16)
def all_shares(
    group: LayerGroup, config: ParallelConfig, model_layers: int
) -> tuple[tuple[Rank, Share], ...]:
    """Every rank that holds something of the group, with its share, in order of rank number.

    Raises:
        InvalidArgument: the group has layers beyond the model.
        NotCertified: as :func:`share_of`.
    """
    if group.attention == "opaque":
        owner = _opaque_owner(group, config)
        return ((owner, share_of(group, config, owner, model_layers)),)
    pairs = ((rank, share_of(group, config, rank, model_layers)) for rank in config.ranks())
    return tuple(pair for pair in pairs if not pair[1].empty)


def certify(group: LayerGroup, config: ParallelConfig, model_layers: int) -> None:
    """Prove that the elected writers of this config tile every canonical page exactly once.

    A page's bytes are the boxes layer x head x token. Stages must partition the layers. Head ranges
    must partition the heads, and within each range the ranks must be exactly the pairs of
    context rank and replica, each pair once. Tokens are partitioned by construction, as
    ``(t // interleave) % cp`` has one value. So whichever replica a key elects, one rank writes
    each byte. That part does not depend on the stage, so one stage stands for all.

    Raises:
        InvalidArgument: the group has layers beyond the model.
        NotCertified: there is no such proof; the message says what fails.
    """
    if group.attention == "opaque":
        _opaque_owner(group, config)
        return
    stages = [
        _layers(group, config.stage(pp, model_layers), model_layers) for pp in range(config.pp)
    ]
    _check_partition(group, config, "layers", stages, group.num_layers)
    holders: dict[range, list[Share]] = defaultdict(list)
    for pcp in range(config.pcp):
        for tp in range(config.tp):
            share = share_of(group, config, Rank(0, pcp, tp), model_layers)
            holders[share.heads].append(share)
    _check_partition(group, config, "heads", sorted(holders, key=_start), group.heads)
    for heads, shares in holders.items():
        found = sorted((s.lattice.index, s.replica) for s in shares)
        replicas = shares[0].replicas
        wanted = [(c, r) for c in range(config.cp) for r in range(replicas)]
        alike = {(s.lattice.interleave, s.lattice.cp, s.replicas) for s in shares}
        if found != wanted or alike != {(config.interleave, config.cp, replicas)}:
            raise _refusal(
                group, f"heads {heads.start} to {heads.stop - 1} are not tiled exactly once", config
            )


def _start(span: range) -> int:
    return span.start


def _check_partition(
    group: LayerGroup, config: ParallelConfig, what: str, spans: list[range], size: int
) -> None:
    end = 0
    for span in spans:
        if span.start != end or span.step != 1:
            raise _refusal(group, f"its {what} are not tiled exactly once at {end}", config)
        end = span.stop
    if end != size:
        raise _refusal(group, f"its {what} from {end} are on no rank", config)


def _layers(group: LayerGroup, stage: range, model_layers: int) -> range:
    if group.layers[-1] >= model_layers:
        raise InvalidArgument(
            f"layer group {group.name!r} has layer {group.layers[-1]}, but the model has only "
            f"{model_layers} layers; correct model_layers or the group's layers"
        )
    return range(bisect_left(group.layers, stage.start), bisect_left(group.layers, stage.stop))


def _copies(group: LayerGroup, config: ParallelConfig) -> int:
    """Number of TP ranks that hold each head, before DCP splits its tokens among them."""
    larger, smaller = max(group.heads, config.tp), min(group.heads, config.tp)
    if larger % smaller:
        raise _refusal(
            group, f"{config.tp} TP ranks cannot share {group.heads} KV heads evenly", config
        )
    copies = config.tp // group.heads if config.tp > group.heads else 1
    if copies % config.dcp:
        raise _refusal(
            group,
            f"dcp {config.dcp} does not divide the {copies} TP ranks that hold the same heads",
            config,
        )
    if group.attention == "linear" and config.cp > 1:
        raise _refusal(
            group, "a linear-attention state is not split by tokens, but cp is above 1", config
        )
    return copies


def _opaque_owner(group: LayerGroup, config: ParallelConfig) -> Rank:
    coordinates = str(group.parallel).rpartition(";rank=")[2].split(".")
    if len(coordinates) == 3 and all(c.isascii() and c.isdecimal() for c in coordinates):
        rank = Rank(*(int(c[:9]) for c in coordinates))
        inside = rank.pp < config.pp and rank.pcp < config.pcp and rank.tp < config.tp
        if inside and config.describe(rank) == group.parallel:
            return rank
    raise _refusal(group, f"it is opaque and belongs to {group.parallel}", config)


def _refusal(group: LayerGroup, reason: str, config: ParallelConfig) -> NotCertified:
    return NotCertified(
        f"layer group {group.name!r} cannot be mapped onto {config}: {reason}; use a config that "
        "fits, or store the rank's pages in an opaque group",
        reason=reason,
    )
