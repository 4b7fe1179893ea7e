"""How a new version of the weights takes over: a pure state machine, fed by facts and a clock.

Host only: no JAX, no HTTP, no threads.
"""

from __future__ import annotations

import hashlib


def place_of(key: str, version: str) -> float:
    """Where a key stands in [0, 1): those below the canary's share get it.

    Another version has other first keys, and a share that grows only adds keys.
    """
    digest = hashlib.blake2b(f"{version}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
