"""Parameters replaced where they are, one tensor at a time.

For a device without room for two versions. While it goes on, and after an error, the parameters
are of both, or of none.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax

from checkpoints.checkpoint import Checkpoint
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.weights import each_weight


def stream_weights(params: Params, checkpoint: Checkpoint, decoder: Decoder) -> None:
    """Frees each old tensor when the new one has been read, and puts that in its place.

    Memory: of one tensor more than before, on the host.

    Args:
        params: of this decoder; nothing computes with them.
    Raises: as `each_weight`, and what the device raises.
    """
    weights = each_weight(checkpoint, decoder)
    with closing(weights):
        for arrays, _ in weights:
            for path, array in arrays.items():
                holder: Any = params
                for part in path[:-1]:
                    holder = holder[part]
                key = path[-1]
                holder[key].delete()
                holder[key] = jax.block_until_ready(jax.device_put(array))
