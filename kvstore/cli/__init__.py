"""The command line, one module a command. Each imports what it needs when it runs."""

from __future__ import annotations
