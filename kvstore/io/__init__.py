"""Bytes in and out of storage: the engine protocol and the engines behind it."""

from __future__ import annotations
