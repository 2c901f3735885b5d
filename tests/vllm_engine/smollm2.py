"""Prints the folder of a checkpoint of SmolLM2; the demonstration's packages make it if need be."""

from __future__ import annotations

import sys

from kvstore.demo.model import checkpoint_folder, default_cache, load_model

if __name__ == "__main__":
    cache = default_cache()
    model = load_model("float32", cache)
    sys.stdout.write(f"{checkpoint_folder(cache, model.digest)}\n")
