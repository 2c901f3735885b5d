"""Make everything below spec/vectors: valid stores, spoilt ones, and vectors of keys and names.

    python tools/make_vectors.py                  writes spec/vectors anew
    python tools/make_vectors.py --check          fails if spec/vectors is not what it would write
    python tools/make_vectors.py --expand FOLDER  writes every spoilt store out, a folder each

It follows the specification alone, with NumPy and the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from vector_faults import invalid, variations
from vector_stores import STORES, Files, Json
from vector_tables import tables

VECTORS = Path(__file__).parent.parent / "spec" / "vectors"


def apply(change: Json, root: Path) -> None:
    """Carry out one change on a store in a folder."""
    path, operation = root / change["path"], change["op"]
    old = path.read_bytes() if path.is_file() else b""
    if operation in ("move", "copy"):
        shutil.copytree(path, root / change["to"])
        if operation == "move":
            shutil.rmtree(path)
    elif operation == "remove":
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(changed(change, old))


def changed(change: Json, old: bytes) -> bytes:
    """The new bytes of a file that a change alters."""
    new = bytes.fromhex(change["hex"]) if "hex" in change else change.get("text", "").encode()
    at = change.get("at", 0)
    made: dict[str, bytes] = {
        "replace": old.replace(change.get("from", "").encode(), change.get("to", "").encode(), 1),
        "write": new,
        "repeat": new * change.get("times", 1),
        "splice": old[:at] + new + old[at + len(new) :],
        "truncate": old[: change.get("bytes", 0)],
        "append": old + new,
    }
    return made[change["op"]]


def expand(vector: Json, vectors: Path, target: Path) -> None:
    """Write a spoilt or varied store out into a folder that is not there yet."""
    shutil.copytree(vectors / "valid" / vector["base"], target)
    for change in vector["changes"]:
        apply(change, target)


def generate() -> Files:
    """Every file below spec/vectors that this tool makes."""
    files: Files = {}
    valid = []
    for name, make in STORES.items():
        store = make()
        about = (make.__doc__ or "").strip()
        valid.append({"name": name, "about": about, "extents": store.expected})
        files |= {f"valid/{name}/{path}": data for path, data in store.files.items()}
    manifest = {
        "format": "kvstore",
        "version": "1.0",
        "valid": valid,
        "variations": list(variations()),
        "invalid": invalid(),
    }
    names = [str(v["name"]) for v in (*variations(), *invalid())]
    if len(set(names)) != len(names):
        raise ValueError(
            f"two vectors have one name: {sorted(n for n in names if names.count(n) > 1)}"
        )
    files["manifest.json"] = _json(manifest)
    files |= {f"{name}.json": _json(table) for name, table in tables().items()}
    return files


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description="Make the vectors of the format specification.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--expand", type=Path, metavar="FOLDER", help="write spoilt stores out")
    options = parser.parse_args()
    if options.expand:
        manifest = json.loads((VECTORS / "manifest.json").read_text())
        for vector in manifest["variations"] + manifest["invalid"]:
            expand(vector, VECTORS, options.expand / vector["name"])
        return 0
    files = generate()
    there = {
        str(path.relative_to(VECTORS)): path.read_bytes()
        for path in VECTORS.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    if options.check:
        for path in sorted(files.keys() | there.keys()):
            if files.get(path) != there.get(path):
                print(f"differs: {path}")
        return int(files != there)
    for path in there:
        (VECTORS / path).unlink()
    shutil.rmtree(VECTORS / "valid", ignore_errors=True)  # the folders, empty now
    for path, data in files.items():
        (VECTORS / path).parent.mkdir(parents=True, exist_ok=True)
        (VECTORS / path).write_bytes(data)
    total = sum(map(len, files.values()))
    digest = hashlib.sha256(b"".join(files[path] for path in sorted(files))).hexdigest()
    print(f"{len(files)} files, {total} bytes, sha256 {digest[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
