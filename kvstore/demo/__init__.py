"""The demonstration: a real model's KV cache, stored under one parallel config, used under another.

``kvstore demo`` computes the cache of a document once, lays it out as the ranks of an engine would
hold it, and lets one process a rank store its own part. Fresh processes then load it as the ranks
of another config with another page layout, and the model goes on from what they hold.
"""

from __future__ import annotations
