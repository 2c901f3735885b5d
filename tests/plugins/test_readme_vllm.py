"""What the README says of vLLM is what the plugin takes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from kvstore.plugins.vllm.settings import Settings, settings
from kvstore.plugins.vllm.versions import SUPPORTED

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README[README.index("## With vLLM") : README.index("## Commands")]


def test_the_configuration_is_valid() -> None:
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", SECTION, re.DOTALL)
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_load_failure_policy"] == "recompute"
    assert settings(config["kv_connector_extra_config"]).root == "/nvme/kvstore"


def test_every_key_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", SECTION, re.MULTILINE))
    assert list(rows) == [f.name for f in fields(Settings)]
    defaults = Settings(root="/x")
    for name, said in rows.items():
        if said.startswith("`"):
            value = getattr(defaults, name)
            text = json.dumps(value) if not isinstance(value, str) else value
            assert (
                float(said.strip("`")) == value if isinstance(value, float) else said == f"`{text}`"
            )


def test_versions() -> None:
    assert f"vLLM {' and '.join(SUPPORTED)}" in SECTION
