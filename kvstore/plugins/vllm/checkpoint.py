"""What a checkpoint's own configuration says of its KV cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument

CONFIG = "config.json"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of an attention cache; zero where not known.

    Attributes:
        heads: KV heads of the whole model.
        head_size: elements of a key.
        value_size: elements of a value; 0: as many.
        latent: for latent attention (MLA), elements of the latent; the ones above do not matter.
        rope: for latent attention, elements of the key's rotary part.
    """

    heads: int = 0
    head_size: int = 0
    value_size: int = 0
    latent: int = 0
    rope: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{name} is {value!r}; it is a whole number, 0 if not known")

    @property
    def known(self) -> bool:
        """Whether they say what a token's cell is."""
        return bool(self.latent or (self.heads and self.head_size))


def checkpoint_sizes(folder: Path) -> AttentionSizes:
    """Sizes out of the ``config.json`` of a checkpoint in the format of Hugging Face.

    Raises:
        InvalidArgument: there is none, or it does not say; the message names the sizes to give.
    """
    path = folder / CONFIG
    try:
        with path.open("rb") as opened:
            config: Any = json.loads(opened.read(_MOST_BYTES))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"cannot read {str(path)!r} ({error}); give the sizes of the cache: heads and "
            "head_size, or latent and rope"
        ) from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if not isinstance(config, dict):
        config = {}
    sizes = _sizes(config)
    if not sizes.known:
        raise InvalidArgument(
            f"{str(path)!r} does not say how large the KV cache of a token is; give heads and "
            "head_size, or latent and rope"
        )
    return sizes


def _sizes(config: dict[str, Any]) -> AttentionSizes:
    def number(*names: str) -> int:
        found = (config.get(name) for name in names)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), 0)

    latent = number("kv_lora_rank")
    if latent:
        return AttentionSizes(latent=latent, rope=number("qk_rope_head_dim"))
    queries = number("num_attention_heads", "n_head")
    size = number("head_dim") or number("hidden_size", "n_embd") // max(1, queries)
    return AttentionSizes(heads=number("num_key_value_heads") or queries, head_size=size)
