"""Parallel configs: how an engine lays a model over ranks, as plain numbers.

A rank has three coordinates: pipeline stage (PP), prefill context rank (PCP) and tensor rank (TP).
Decode context parallelism (DCP) takes its ranks from inside TP. Ranks are numbered with TP fastest:
``number = (pp * PCP + pcp) * TP + tp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import accumulate

from kvstore.errors import InvalidArgument, NotCertified, require_kind

MAX_RANKS = 1 << 16
"""The most ranks a config may have."""

MAX_INTERLEAVE = 1 << 16
"""The longest run of tokens that one context-parallel rank holds before the next rank's turn."""

PCP_KV_KINDS = ("sharded", "replicated")


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Coordinates of one rank; see :class:`ParallelConfig`. As text: ``pp.pcp.tp``."""

    pp: int = 0
    pcp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"{self.pp}.{self.pcp}.{self.tp}"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How an engine spreads a model's KV cache over its ranks.

    The text form, ``str(config)``, lists what differs from the defaults: ``tp=9,dcp=3``.

    Attributes:
        tp: tensor-parallel ranks; they split the KV heads, or hold copies where there are more
            ranks than heads.
        pp: pipeline stages; they split the layers.
        dcp: decode context ranks, taken from the TP ranks that hold the same heads; they split the
            tokens.
        pcp: prefill context ranks.
        interleave: tokens that one context rank holds in a row before the next rank's turn.
        pcp_kv: whether PCP ranks split the tokens (``sharded``) or all hold the same
            (``replicated``).
        pp_layers: layers of the whole model on each stage, in order. Needed where ``pp`` does not
            divide the model's layers.

    Raises:
        InvalidArgument: a field is out of range; the message names it.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    pcp_kv: str = "sharded"
    pp_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "pcp"):
            _check_number(name, getattr(self, name), 1, MAX_RANKS)
        _check_number("interleave", self.interleave, 1, MAX_INTERLEAVE)
        if self.world_size > MAX_RANKS:
            raise InvalidArgument(
                f"a parallel config of {self.world_size} ranks is too large: pp x pcp x tp must be "
                f"at most {MAX_RANKS}"
            )
        if self.pcp_kv not in PCP_KV_KINDS:
            known = ", ".join(PCP_KV_KINDS)
            raise InvalidArgument(f"pcp_kv is {self.pcp_kv!r}; it must be one of: {known}")
        if self.pp_layers is not None:
            require_kind("pp_layers", self.pp_layers, Iterable, "a count of layers for each stage")
            object.__setattr__(self, "pp_layers", tuple(self.pp_layers))
            for layers in self.pp_layers:
                _check_number("a stage's count in pp_layers", layers, 0, MAX_RANKS)
            if len(self.pp_layers) != self.pp:
                raise InvalidArgument(
                    f"pp_layers has {len(self.pp_layers)} stages, but pp is {self.pp}; give one "
                    "count of layers for each stage"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks. DCP adds none: its ranks are TP ranks."""
        return self.pp * self.pcp * self.tp

    @property
    def cp(self) -> int:
        """Number of context-parallel ranks, over which tokens are split."""
        return self.dcp * self.pcp if self.pcp_kv == "sharded" else self.dcp

    def ranks(self) -> Iterator[Rank]:
        """Every rank, in the order of its number."""
        for pp in range(self.pp):
            for pcp in range(self.pcp):
                for tp in range(self.tp):
                    yield Rank(pp, pcp, tp)

    def number(self, rank: Rank) -> int:
        """The rank's number, 0 to ``world_size - 1``.

        Raises:
            InvalidArgument: the config has no such rank.
        """
        self._check_rank(rank)
        return (rank.pp * self.pcp + rank.pcp) * self.tp + rank.tp

    def rank(self, number: int) -> Rank:
        """The rank of that number; the inverse of :meth:`number`.

        Raises:
            InvalidArgument: the config has no such rank.
        """
        _check_number("rank number", number, 0, self.world_size - 1)
        outer, tp = divmod(number, self.tp)
        pp, pcp = divmod(outer, self.pcp)
        return Rank(pp, pcp, tp)

    def cp_rank(self, rank: Rank) -> int:
        """The rank's index among the :attr:`cp` context-parallel ranks.

        Raises:
            InvalidArgument: the config has no such rank.
        """
        self._check_rank(rank)
        inner = rank.tp % self.dcp
        return rank.pcp * self.dcp + inner if self.pcp_kv == "sharded" else inner

    def stage(self, pp: int, model_layers: int) -> range:
        """Model layers that pipeline stage ``pp`` holds, of ``model_layers`` in the whole model.

        Raises:
            InvalidArgument: the config has no such stage, or ``model_layers`` is no count.
            NotCertified: the stages do not add up to the model, or their sizes are not known.
        """
        _check_number("pipeline stage", pp, 0, self.pp - 1)
        _check_number("model_layers", model_layers, 1, MAX_RANKS)
        if self.pp_layers is None:
            if model_layers % self.pp:
                reason = f"{self.pp} pipeline stages do not divide {model_layers} model layers"
                raise NotCertified(
                    f"{self}: {reason}; give pp_layers, the layers of each stage", reason=reason
                )
            size = model_layers // self.pp
            return range(pp * size, (pp + 1) * size)
        ends = list(accumulate(self.pp_layers))
        if ends[-1] != model_layers:
            reason = f"pp_layers adds up to {ends[-1]} layers, but the model has {model_layers}"
            raise NotCertified(f"{self}: {reason}; correct pp_layers", reason=reason)
        return range(ends[pp] - self.pp_layers[pp], ends[pp])

    def describe(self, rank: Rank) -> str:
        """Config and rank as text, for instance ``tp=9,dcp=3;rank=0.0.4``: names an opaque group.

        Raises:
            InvalidArgument: the config has no such rank.
        """
        self._check_rank(rank)
        return f"{self};rank={rank}"

    def __str__(self) -> str:
        changed = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
                changed.append(f"{field.name}={text}")
        return ",".join(changed) or "tp=1"

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """Read the text form, such as ``tp=9,dcp=3`` or ``tp=2,pp=2,pp_layers=16+14``.

        Raises:
            InvalidArgument: the text is not of that form, or a value is out of range.
        """
        require_kind("a parallel config's text", text, str, "text such as 'tp=9,dcp=3'")
        known = [field.name for field in fields(cls)]
        values: dict[str, int | str | tuple[int, ...]] = {}
        for item in text.split(","):
            name, equals, value = (piece.strip() for piece in item.partition("="))
            if not equals or name not in known or name in values:
                raise InvalidArgument(
                    f"parallel config {text!r}: {item!r} must be name=value, each name once; names "
                    f"are: {', '.join(known)}"
                )
            if name == "pcp_kv":
                values[name] = value
            elif name == "pp_layers":
                values[name] = tuple(_parse_number(text, piece) for piece in value.split("+"))
            else:
                values[name] = _parse_number(text, value)
        return cls(**values)  # type: ignore[arg-type]  # the constructor checks every value

    def _check_rank(self, rank: Rank) -> None:
        for axis in ("pp", "pcp", "tp"):
            value, size = getattr(rank, axis), getattr(self, axis)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
                raise InvalidArgument(
                    f"rank {rank} is not one of {self}: {axis} must be from 0 to {size - 1}"
                )


def _check_number(what: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{what} must be a whole number from {low} to {high}, not {value!r}")


def _parse_number(text: str, value: str) -> int:
    # At most 9 digits: more is out of every range here, and int() is slow on very long text.
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise InvalidArgument(f"parallel config {text!r}: {value!r} is not a whole number")
    return int(value)
