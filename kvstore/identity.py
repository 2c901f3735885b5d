"""What a namespace is: everything that changes the meaning of the bytes in it.

Two engines share a namespace exactly when their identities agree, so the identity holds the model
and its weights, the layer groups and their element types, the key scheme, and whatever else changes
a KV cache (rope scaling, KV quantisation, adapters). It never holds a parallel config, except for
opaque groups, whose pages belong to one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvstore.elements import ELEMENT_TYPES
from kvstore.errors import FormatError, GeometryMismatch, InvalidArgument, require_kind
from kvstore.geometry import (
    MAX_BLOCK_TOKENS,
    MAX_CONTENT,
    MAX_EXTENT_BLOCKS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_PARTS,
    ContentPart,
    LayerGroup,
)
from kvstore.jsonform import Fields, canonical
from kvstore.keys import MAX_KEY_BYTES, MIN_KEY_BYTES, KeyScheme
from kvstore.paths import slug

FINGERPRINT_TAG = b"kvstore/v1/name\0"
MAX_GROUPS = 256
MAX_VARIANTS = 256
MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a namespace.

    Attributes:
        model: the model's name, as people write it.
        model_layers: layers of the whole model that pipeline stages are cut from.
        groups: its layer groups; each model layer belongs to as many as it has caches.
        revision: the weights' revision (a commit hash, a tag), or
        weights_digest: a digest of the weights themselves. At least one is needed: two fine-tunes
            of one name must not share a cache.
        key_scheme: how block keys are made.
        variants: anything else that changes the bytes, by name: rope scaling, KV scale policy,
            adapter digest ... A copy is taken, and cannot be changed.
        fingerprint: SHA-256 of the identity's canonical JSON, as hex; not given but derived.
        namespace: directory name of the namespace; derived too.

    Raises:
        InvalidArgument: a field is missing or out of range.
    """

    model: str
    model_layers: int
    groups: tuple[LayerGroup, ...]
    revision: str | None = None
    weights_digest: str | None = None
    key_scheme: KeyScheme = field(default_factory=KeyScheme.sha256)
    variants: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = field(init=False, compare=False, repr=False, default="")
    namespace: str = field(init=False, compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        require_kind("groups", self.groups, Iterable, "a tuple of LayerGroup")
        require_kind("variants", self.variants, Mapping, "a mapping of text to text")
        require_kind("key_scheme", self.key_scheme, KeyScheme, "a KeyScheme")
        object.__setattr__(self, "groups", tuple(self.groups))
        for group in self.groups:
            require_kind("a layer group", group, LayerGroup, "a LayerGroup")
        object.__setattr__(self, "variants", MappingProxyType(dict(self.variants)))
        _check_text("model", self.model)
        for name, value in (("revision", self.revision), ("weights_digest", self.weights_digest)):
            if value is not None:
                _check_text(name, value)
        for name, value in self.variants.items():
            _check_text("variant name", name)
            _check_text(f"variant {name!r:.80}", value)
        if self.revision is None and self.weights_digest is None:
            raise InvalidArgument(
                "an identity needs revision or weights_digest: two fine-tunes of one model name "
                "must not share a cache"
            )
        if len(self.variants) > MAX_VARIANTS:
            raise InvalidArgument(f"{len(self.variants)} variants; at most {MAX_VARIANTS}")
        self._check_layers()
        # Each decoded extent asks for these, so they are made once.
        digest = hashlib.sha256(FINGERPRINT_TAG + canonical(self.to_json())).hexdigest()
        object.__setattr__(self, "fingerprint", digest)
        object.__setattr__(self, "namespace", f"{slug(self.model)}-{digest[:32]}")

    def _check_layers(self) -> None:
        if (
            not isinstance(self.model_layers, int)
            or isinstance(self.model_layers, bool)
            or not 1 <= self.model_layers <= MAX_LAYERS
        ):
            raise InvalidArgument(
                f"model_layers is {self.model_layers!r}, not a whole number from 1 to {MAX_LAYERS}"
            )
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InvalidArgument(f"an identity has 1 to {MAX_GROUPS} layer groups")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"layer groups must have different names, not {names}")
        for group in self.groups:
            if group.layers[-1] >= self.model_layers:
                raise InvalidArgument(
                    f"layer group {group.name!r} has layer {group.layers[-1]}, but the model has "
                    f"layers 0 to {self.model_layers - 1}"
                )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Identity], tuple[object, ...]]:
        # The view on the variants cannot be copied to another process; what it shows can.
        given = (self.model, self.model_layers, self.groups, self.revision, self.weights_digest)
        return (Identity, (*given, self.key_scheme, dict(self.variants)))

    def group(self, name: str | None = None) -> LayerGroup:
        """The layer group of that name; the only one when there is but one.

        Raises:
            InvalidArgument: no such group, or several and no name.
        """
        if name is None and len(self.groups) == 1:
            return self.groups[0]
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(g.name for g in self.groups)
        raise InvalidArgument(f"no layer group {name!r} in {self.model!r}; it has: {known}")

    def to_json(self) -> dict[str, Any]:
        """The identity object of the format, every field present."""
        return {
            "model": self.model,
            "model_layers": self.model_layers,
            "revision": self.revision,
            "weights_digest": self.weights_digest,
            "variants": dict(self.variants),
            "key_scheme": _scheme_to_json(self.key_scheme),
            "groups": [group_to_json(g) for g in self.groups],
        }

    def require_same(self, given: Identity, where: str) -> None:
        """Refuse another identity than this, the stored one.

        Raises:
            GeometryMismatch: names every field that differs.
        """
        fields: dict[str, tuple[object, object]] = {}
        _differences("", self.to_json(), given.to_json(), fields)
        if fields:
            listed = "; ".join(f"{k}: stored {a!r}, given {b!r}" for k, (a, b) in fields.items())
            raise GeometryMismatch(
                f"{where} was made with another identity ({listed}); "
                "open it with its own, or let the given one have a namespace of its own",
                fields,
            )


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidArgument(f"identity field {what} must be text, not {text!r:.80}")
    if not 1 <= len(text) <= MAX_TEXT:
        raise InvalidArgument(
            f"identity field {what} has {len(text)} characters, not 1 to {MAX_TEXT}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"identity field {what} is not Unicode text: {error}") from None


def group_to_json(group: LayerGroup) -> dict[str, Any]:
    """The layer group object of the format."""
    return {
        "name": group.name,
        "layers": list(group.layers),
        "heads": group.heads,
        "block_tokens": group.block_tokens,
        "parts": parts_to_json(group.parts),
        "attention": group.attention,
        "window": group.window,
        "extent_blocks": group.extent_blocks,
        "shard_layers": group.shard_layers,
        "shard_heads": group.shard_heads,
        "parallel": group.parallel,
    }


def parts_to_json(parts: tuple[ContentPart, ...]) -> list[dict[str, Any]]:
    """The list of content parts of the format."""
    return [{"name": p.name, "element": p.element.name, "count": p.count} for p in parts]


def parts_from_json(items: list[Any], what: str) -> tuple[ContentPart, ...]:
    """Content parts out of a record.

    Raises:
        FormatError: a field is missing or out of range.
    """
    parts = []
    for i, item in enumerate(items):
        part = Fields(item, f"{what}, part {i}")
        stored = part.text("element", 32)
        if stored not in ELEMENT_TYPES:
            raise FormatError(f"{part.what}: element type {stored!r} is not known to version 1")
        count = part.integer("count", 1, MAX_CONTENT)
        try:
            parts.append(ContentPart(part.text("name", 32), ELEMENT_TYPES[stored], count))
        except InvalidArgument as error:
            raise FormatError(f"{part.what}: {error}") from None
    return tuple(parts)


def identity_from_json(value: object, what: str) -> Identity:
    """An identity out of a namespace record.

    Raises:
        FormatError: a field is missing, of another type, or out of range.
    """
    record = Fields(value, what)
    variants = record.fields("variants")
    try:
        return Identity(
            model=record.text("model"),
            model_layers=record.integer("model_layers", 1, MAX_LAYERS),
            groups=tuple(_group_from_json(g, what) for g in record.array("groups", MAX_GROUPS)),
            revision=record.optional_text("revision"),
            weights_digest=record.optional_text("weights_digest"),
            key_scheme=_scheme_from_json(record.fields("key_scheme")),
            variants={name: variants.text(name) for name in variants.names()},
        )
    except InvalidArgument as error:
        raise FormatError(f"{what}: {error}") from None


def _group_from_json(value: object, what: str) -> LayerGroup:
    group = Fields(value, f"{what}, layer group")
    layers = group.array("layers", MAX_LAYERS)
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in layers):
        raise FormatError(f"{group.what}: 'layers' holds something other than whole numbers")
    return LayerGroup(
        name=group.text("name", 64),
        layers=tuple(layers),
        heads=group.integer("heads", 1, MAX_HEADS),
        block_tokens=group.integer("block_tokens", 1, MAX_BLOCK_TOKENS),
        parts=parts_from_json(group.array("parts", MAX_PARTS), group.what),
        attention=group.text("attention", 32),
        window=group.optional_integer("window", 1, 1 << 31),
        extent_blocks=group.integer("extent_blocks", 1, MAX_EXTENT_BLOCKS),
        shard_layers=group.integer("shard_layers", 1, MAX_LAYERS),
        shard_heads=group.integer("shard_heads", 1, MAX_HEADS),
        parallel=group.optional_text("parallel"),
    )


def _scheme_to_json(scheme: KeyScheme) -> dict[str, Any]:
    return {
        "scheme": scheme.scheme,
        "name": scheme.name,
        "algorithm": scheme.algorithm,
        "root": scheme.root.hex(),
        "key_bytes": scheme.key_bytes,
    }


def _scheme_from_json(fields: Fields) -> KeyScheme:
    return KeyScheme(
        fields.text("scheme", 64),
        fields.optional_text("name", 64),
        fields.optional_text("algorithm", 64),
        fields.hex_bytes("root", 1, MAX_KEY_BYTES),
        fields.integer("key_bytes", MIN_KEY_BYTES, MAX_KEY_BYTES),
    )


def _differences(
    name: str, stored: object, given: object, out: dict[str, tuple[object, object]]
) -> None:
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in sorted(stored.keys() | given.keys()):
            _differences(f"{name}.{key}".lstrip("."), stored.get(key), given.get(key), out)
    elif (
        isinstance(stored, list)
        and isinstance(given, list)
        and len(stored) == len(given)
        and any(isinstance(x, dict) for x in stored)
    ):
        for i, (a, b) in enumerate(zip(stored, given, strict=True)):
            _differences(f"{name}[{i}]", a, b, out)
    elif stored != given:
        out[name] = (stored, given)
