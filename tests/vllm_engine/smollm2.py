"""Prints the folder of a checkpoint of SmolLM2; the demonstration's packages make it if need be."""

from __future__ import annotations

import sys

from kvstore.demo.model import default_cache, load_model

if __name__ == "__main__":
    load_model("float32", default_cache())
    sys.stdout.write(f"{max(default_cache().iterdir())}\n")
