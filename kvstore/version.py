"""Version of the package, and the name under which it signs records."""

from __future__ import annotations

__version__ = "0.1.0"
SOFTWARE = f"kvstore {__version__}"
