"""A KV cache as plain bits, so that equal means equal to the last of them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Bits = npt.NDArray[Any]
"""``[layer, head, token, part, element]`` of unsigned integers as wide as the cache's element type;
part 0 is the key, part 1 the value. A rank's pool of pages is bits in another order."""
