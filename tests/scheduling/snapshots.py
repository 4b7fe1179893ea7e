"""Copies of a world that are cheap to take and cheap to make again.

What is never written after it was made (batches, requests, limits) is shared between all copies.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
from typing import Any

import numpy as np

from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.batch_builder import _Formation
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduled import Rows
from tests.scheduling.world import Setup

_SHARED = (Batch, Buckets, LengthLimit, Request, Rows, Setup, _Formation)


class Snapshots:
    """Freezes worlds and thaws copies of them."""

    def __init__(self) -> None:
        self._shared: list[Any] = []
        self._place_of: dict[int, int] = {}  # id -> place in `_shared`, which keeps it alive
        self._find_class = functools.cache(self._found_class)

    def freeze(self, world: Any) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.dispatch_table = dict.fromkeys(_SHARED, self._share) | {np.ndarray: _array}
        pickler.dump(world)
        return buffer.getvalue()

    def thaw(self, frozen: bytes) -> Any:
        return _Unpickler(frozen, self._find_class).load()

    def _share(self, item: Any) -> tuple[Any, tuple[int]]:
        place = self._place_of.get(id(item))
        if place is None:
            place = self._place_of[id(item)] = len(self._shared)
            self._shared.append(item)
        return shared, (place,)

    def _found_class(self, module_name: str, name: str) -> Any:
        if module_name == shared.__module__ and name == shared.__name__:
            return self._shared.__getitem__
        return getattr(importlib.import_module(module_name), name)


def shared(place: int) -> Any:
    """Stands for the look-up of a shared object while it is frozen."""
    raise AssertionError(f"object {place} is thawed by Snapshots only")


def _array(array: Any) -> tuple[Any, tuple[Any, ...]]:
    """An array that can be written, as its own would be."""
    return np.ndarray, (array.shape, array.dtype.str, bytearray(array.tobytes()))


class _Unpickler(pickle.Unpickler):
    def __init__(self, frozen: bytes, find_class: Any):
        super().__init__(io.BytesIO(frozen))
        self.find_class = find_class
