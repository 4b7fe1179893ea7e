"""Reads one config.json, key by key, with its old and new spellings.

No JAX here. A key that would change the arithmetic is read or refused, never passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoints.formats import METHOD
from jaxinfer.errors import ConfigError
from jaxinfer.models.config import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    Activation,
    LayerType,
    RopeScaling,
)
from jaxinfer.models.rope_keys import TRAINED_POSITIONS, read_scaling

ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

PARTIAL = "partial_rotary_factor"
MAX_POSITIONS, NUM_LAYERS = "max_position_embeddings", "num_hidden_layers"
MAX_SIZE = (1 << 31) - 1  # of an axis
MAX_LAYERS = 1024  # each is planned by itself


class HfKeys:
    """One config.json, a null being the same as no key.

    Args:
        defaults: transformers', for keys that the file leaves out.
    Raises, as all its methods do: ConfigError naming the key, what it must be and what it is.
    """

    def __init__(self, hf: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._hf: dict[str, Any] = dict(defaults)
        self._hf |= {key: value for key, value in hf.items() if value is not None}
        experts = hf.get("num_experts") or hf.get("num_local_experts")  # the same by either name
        if experts is not None:
            self._hf |= {"num_experts": experts, "num_local_experts": experts}
        # transformers 5 writes rope_parameters; older files rope_theta and rope_scaling.
        rope = self._hf.get("rope_parameters") or self._hf.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise _not_flat(rope)
        self._rope: Mapping[str, Any] = rope

    def get(self, key: str) -> Any:
        """As it is in the file or in the defaults; None if there is none."""
        return self._hf.get(key)

    def positive(self, key: str, *, default: int | None = None) -> int:
        value, most = self._hf.get(key, default), MAX_LAYERS if key == NUM_LAYERS else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {key} must be a positive integer; got {value!r:.100}")
        if value > most:
            raise ConfigError(f"config.json: {key} must be at most {most}; got {value!r:.100}")
        return value

    def whole(self, key: str) -> int:
        """A positive integer or 0."""
        return 0 if self._hf.get(key) == 0 else self.positive(key)

    def at_most(self, key: str, limit: str) -> int:
        """A positive integer that is not above that of another key."""
        value, most = self.positive(key), self.positive(limit)
        if value > most:
            raise ConfigError(f"config.json: {key} must be at most {limit} ({most}); got {value}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive one."""
        value = self._hf.get(key, default)
        if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ConfigError(f"config.json: {key} must be a positive number; got {value!r:.100}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self._hf.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false; got {value!r:.100}")
        return value

    def refuse(self, *keys: str) -> None:
        """Those that must be absent, false or 0."""
        for key in keys:
            if self._hf.get(key):
                raise ConfigError(
                    f"config.json: {key} must be absent or off; got {self.get(key)!r:.100}"
                )

    def refuse_unsupported(self) -> None:
        """What no family of ours has."""
        quantization = self._hf.get("quantization_config")
        if quantization and not (
            isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
        ):
            raise ConfigError(
                "config.json: quantization_config must be absent or ours; open_checkpoint converts "
                "those of other tools that are read"
            )
        self._refuse_partial("rotary_pct")

    def partial_rotary_factor(self) -> float:
        """Of families whose heads may turn in part."""
        return HfKeys(self._rope, {}).number(PARTIAL, default=self.number(PARTIAL, default=1.0))

    def refuse_partial_rotary(self) -> None:
        """Of the others."""
        self._refuse_partial(PARTIAL)

    def _refuse_partial(self, key: str) -> None:
        for value in (self._hf.get(key), self._rope.get(key)):
            if value not in (None, 1.0):
                raise ConfigError(f"config.json: {key} must be 1; got {value!r:.100}")

    def activation(self, key: str = "hidden_act") -> Activation:
        name = self._hf.get(key, "silu")
        found = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if found is None:
            raise ConfigError(
                f"config.json: {key} must be one of {', '.join(ACTIVATIONS)}; got {name!r:.100}"
            )
        return found

    def layer_types(self, pattern: Iterable[LayerType]) -> tuple[LayerType, ...]:
        """Of each layer; `pattern` is what it is where the file does not name them."""
        types, num_layers = self._hf.get("layer_types"), self.positive("num_hidden_layers")
        if types is None:
            types = list(pattern)
        if not isinstance(types, list | tuple) or not all(kind in LAYER_TYPES for kind in types):
            raise ConfigError(
                f"config.json: layer_types must be of {LAYER_TYPES}; got {types!r:.100}"
            )
        if len(types) != num_layers:
            raise ConfigError(
                f"config.json: layer_types must name each of {num_layers} layers; got {len(types)}"
            )
        return tuple(types)

    def rope_of(self, layer_type: LayerType) -> HfKeys:
        """The keys with that layer type's object of rope_parameters in place of all of them."""
        extra = self._rope.keys() - {FULL, SLIDING}
        own = self._rope.get(layer_type) or {}
        if extra or not isinstance(own, Mapping):
            raise ConfigError(
                f"config.json: rope_parameters must have one object for {FULL} and one for "
                f"{SLIDING}; got {dict(self._rope)!r:.300}"
            )
        found = HfKeys(self._hf | {"rope_parameters": None, "rope_scaling": dict(own)}, {})
        found.refuse_partial_rotary()
        return found

    def rope_theta(self, *, default: float | None = None) -> float:
        """That of rope_parameters; else `default`; else the file's own, which may be absent."""
        if "rope_theta" in self._rope:
            return HfKeys(self._rope, {}).number("rope_theta")
        return default or self.number("rope_theta", default=10000.0)

    def rope_scaling(self) -> RopeScaling | None:
        if any(isinstance(value, Mapping) for value in self._rope.values()):
            raise _not_flat(dict(self._rope))
        return read_scaling(
            self._rope, trained=self.get(TRAINED_POSITIONS), most=self.get(MAX_POSITIONS)
        )


def _not_flat(rope: Any) -> ConfigError:
    return ConfigError(
        f"config.json: rope_parameters or rope_scaling must be one flat object; got {rope!r:.300}"
    )
