"""Opening the store that a command is about."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import NotFound

if TYPE_CHECKING:
    from kvstore.catalog import Catalog
    from kvstore.io.protocol import Engine


def add_root(parser: argparse.ArgumentParser) -> None:
    """Declare the argument ``ROOT``."""
    parser.add_argument("root", metavar="ROOT", help="the store: a folder or a file:// URL")


@contextmanager
def read_only_engine(root: str) -> Iterator[Engine]:
    """The store's engine, for looking only.

    Raises:
        NotFound: there is no such folder.
    """
    from kvstore.io.select import open_engine

    try:
        engine = open_engine(root, read_only=True, create=False)
    except NotFound:
        raise NotFound(f"there is no store at {root}: no such folder") from None
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def catalog_of(root: str) -> Iterator[Catalog]:
    """The store's catalog, for looking only.

    Raises:
        NotFound: there is no store. FormatError: its record is not valid.
    """
    from kvstore.catalog import Catalog

    with read_only_engine(root) as engine:
        yield Catalog(engine)
