"""How the products of a model keep their weights, and how config.json says it.

Facts only: which integers and scales there are, not how they are found (rounding.py and others) or
multiplied (pallas_kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from checkpoints.errors import CheckpointError

CONFIG_KEY = "quantization_config"
METHOD = "jaxinfer"
GROUP_SIZES = (32, 64, 128)

Activations = Literal["float", "int8", "int8_static"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One product's: value = (q - zero) * scale.

    Raises: ValueError for what no product computes.
    """

    bits: Literal[8, 4] = 8
    group_size: int | None = None  # inputs that share a scale, the last group may be shorter;
    # None: one scale per output
    has_zero: bool = False  # asymmetric: an integer zero point per scale
    activations: Activations = "float"  # int8: each row by its own largest magnitude;
    # int8_static: by one scale from calibration
    has_order: bool = False  # the inputs are taken in an order of the product's own (GPTQ's
    # act-order), which brings together those that share a scale

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"bits must be 8 or 4; got {self.bits}")
        if self.group_size not in (None, *GROUP_SIZES):
            raise ValueError(
                f"group_size must be one of {GROUP_SIZES}, or None for a scale per output; "
                f"got {self.group_size}"
            )
        if self.activations not in get_args(Activations):
            raise ValueError(
                f"activations must be one of {', '.join(get_args(Activations))}; "
                f"got {self.activations!r}"
            )
        is_plain = self.bits == 8 and self.group_size is None and not self.has_zero
        if self.activations != "float" and not is_plain:
            raise ValueError(
                "int8 activations need 8-bit weights with one scale per output and no zero "
                f"points; got {self}"
            )

    def groups(self, num_inputs: int) -> int:
        """Scales per output."""
        return 1 if self.group_size is None else -(-num_inputs // self.group_size)

    @property
    def name(self) -> str:
        """For tables, such as int4-g128 or int8-a8."""
        group = "" if self.group_size is None else f"-g{self.group_size}"
        zero = "-asym" if self.has_zero else ""
        acts = {"float": "", "int8": "-a8", "int8_static": "-a8s"}[self.activations]
        order = "-order" if self.has_order else ""
        return f"int{self.bits}{group}{zero}{acts}{order}"


def packed_group(group_size: int | None, num_inputs: int) -> int:
    """Inputs whose four-bit integers are packed together: an even number."""
    return group_size or num_inputs + num_inputs % 2


HEAD_FORMAT = WeightFormat(8)
"""Of embedding and head: a scale per token. Their errors meet every token at once, and an embedding
is not a product of activations."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of a whole model, or of a part of it (`inside`)."""

    weights: WeightFormat | None  # of the products inside the layers
    head: WeightFormat | None = HEAD_FORMAT  # of embedding and head; None: float
    exceptions: tuple[tuple[str, WeightFormat | None], ...] = ()  # sorted by name, e.g.
    # ("layers.3.mlp.down_proj", WeightFormat(8, 128)); None: float

    def of(self, product: str) -> WeightFormat | None:
        """The format of a product by its dotted name, without `model.`."""
        return dict(self.exceptions).get(product, self.weights)

    def inside(self, prefix: str) -> Quantization:
        """What concerns the products under `prefix`, by their names there."""
        start = f"{prefix}."
        own = ((name, kept) for name, kept in self.exceptions if name.startswith(start))
        exceptions = tuple((name.removeprefix(start), kept) for name, kept in own)
        return Quantization(self.weights, self.head, exceptions)

    def to_config(self) -> dict[str, Any]:
        """The value of config.json's `quantization_config`."""
        return {
            "quant_method": METHOD,
            "weights": _as_dict(self.weights),
            "head": _as_dict(self.head),
            "exceptions": {name: _as_dict(kept) for name, kept in self.exceptions},
        }


def quantization_of(config: Mapping[str, Any], file: str) -> Quantization | None:
    """What a config.json says; None if it is not quantized.

    Raises: CheckpointError for another method's checkpoint, or one that is damaged.
    """
    found = config.get(CONFIG_KEY)
    if found is None:
        return None
    if not isinstance(found, Mapping) or found.get("quant_method") != METHOD:
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise CheckpointError(
            f"{file}: expected {CONFIG_KEY} of quant_method {METHOD!r}, found {method!r:.60}; "
            "give the model that it was made from"
        )
    unknown = sorted(set(found) - {"quant_method", "weights", "head", "exceptions"})
    if unknown:
        raise CheckpointError(
            f"{file}: expected weights, head and exceptions in {CONFIG_KEY}, "
            f"found also {', '.join(map(repr, unknown[:5]))}"
        )
    try:
        exceptions = found.get("exceptions", {})
        return Quantization(
            _from_dict(found["weights"]),
            _from_dict(found["head"]),
            tuple(sorted((name, _from_dict(kept)) for name, kept in exceptions.items())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: expected weights, head and exceptions in {CONFIG_KEY}, found {error}"
        ) from None


def _as_dict(kept: WeightFormat | None) -> dict[str, Any] | None:
    """Without has_order where there is none: versions are hashes of this, and older than it."""
    if kept is None:
        return None
    return {key: value for key, value in asdict(kept).items() if value or key != "has_order"}


def _from_dict(fields: Mapping[str, Any] | None) -> WeightFormat | None:
    if fields is None:
        return None
    kept = WeightFormat(**fields)
    if type(kept.bits) is not int or type(kept.group_size) not in (int, type(None)):
        raise TypeError(f"bits {kept.bits!r} and group_size {kept.group_size!r}")
    if not isinstance(kept.has_zero, bool) or not isinstance(kept.has_order, bool):
        raise TypeError(f"has_zero {kept.has_zero!r:.40} and has_order {kept.has_order!r:.40}")
    return kept
