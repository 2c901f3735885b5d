"""The versions of the engine whose interfaces this plugin was written for and tried on."""

from __future__ import annotations

from kvstore.errors import InvalidArgument

SUPPORTED = ("0.32", "0.33")


def require_supported(version: str) -> None:
    """Refuse an engine whose interfaces may be other ones.

    Raises:
        InvalidArgument: names the version and those supported.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED:
        raise InvalidArgument(
            f"kvstore's vLLM plugin works with vLLM {' and '.join(SUPPORTED)}, not {version}: the "
            "interface for connectors changes between releases. Install one of these, or a release "
            "of kvstore for yours"
        )
