"""What quantizing a model cost, as it is kept beside the weights: certificate.json.

Facts and their form only; jaxinfer/quantization measures them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.hf_folder import read_json

CERTIFICATE_FILE = "certificate.json"
SHIPPED = Path(__file__).parent / "certificates"


@dataclass(frozen=True, slots=True)
class LayerError:
    """Of one product: rms(x @ (w - w')) / rms(x @ w) over the calibration inputs."""

    product: str  # e.g. "layers.3.mlp.down_proj"
    format: str  # WeightFormat.name
    error: float
    error_of_nearest: float  # the same by round-to-nearest


@dataclass(frozen=True, slots=True)
class Perplexity:
    """With the bounds of a 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A standard prompt and what both models say, greedily."""

    prompt: str
    original: str
    quantized: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """All of it; sizes in bytes, divergences in nats per token."""

    original: str  # content version of the model that was quantized
    quantized: str  # content version of what came out, which it is served under: `draft` of
    # save.py has a folder's; rounded_version.py that of weights rounded while they are loaded
    format: str  # WeightFormat.name of most products, and the head's
    method: str
    seed: int
    calibration_hash: str  # of the calibration set's token ids; empty if the method takes no data
    num_calibration_tokens: int
    held_out_hash: str
    num_held_out_tokens: int  # that KL, perplexity and agreement are over
    kl: float  # mean of KL(original || quantized)
    kl_p99: float
    perplexity: Perplexity  # of the quantized model
    original_perplexity: Perplexity
    perplexity_change: Perplexity  # ratio - 1, paired by token
    agreement: float  # share of held-out tokens after which both think the same token likeliest
    num_bytes: int  # of all tensors
    original_bytes: int
    calibration: str = ""  # the set's name
    held_out: str = ""  # the text's name
    window: int = 0  # tokens that each model saw at once
    jaxinfer: str = ""  # version that measured
    jax: str = ""
    exceptions: tuple[str, ...] = ()  # products in another format: "layers.3.mlp.down_proj: int8"
    outliers: tuple[str, ...] = ()  # of the activations, by site, for people
    layer_errors: tuple[LayerError, ...] = ()
    answers: tuple[Answer, ...] = ()

    def line(self) -> str:
        """For people, in one line."""
        change = 100 * self.perplexity_change.value
        return (
            f"{self.format} by {self.method}: KL {self.kl:.4f}, perplexity "
            f"{self.perplexity.value:.2f} ({change:+.2f} %), {100 * self.agreement:.1f} % of "
            f"greedy tokens agree, {self.num_bytes / self.original_bytes:.2f} of the bytes"
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any], file: str) -> Certificate:
        """Raises: CheckpointError for what `to_json` did not write."""
        try:
            fields = dict(found)
            _check_kinds(cls, fields)
            for name in ("perplexity", "original_perplexity", "perplexity_change"):
                fields[name] = Perplexity(**_check_kinds(Perplexity, fields[name]))
            for name in ("exceptions", "outliers"):
                fields[name] = tuple(map(str, fields.get(name, ())))
            for name, kind in (("layer_errors", LayerError), ("answers", Answer)):
                listed = fields.get(name, ())
                fields[name] = tuple(kind(**_check_kinds(kind, each)) for each in listed)
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: expected a certificate, found {error}") from None


_KINDS: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}


def _check_kinds(cls: type, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises: TypeError for a text where a number belongs, and the like."""
    for own in dataclasses.fields(cls):
        if own.name not in found and own.default is not dataclasses.MISSING:
            continue
        kind, value = _KINDS.get(str(own.type)), found[own.name]
        if kind is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise TypeError(f"{own.name} {value!r:.40}")
    return found


def read_certificate(folder: Path) -> Certificate | None:
    """The folder's, or None if it has none. Raises: CheckpointError if it is damaged."""
    path = folder / CERTIFICATE_FILE
    if not path.is_file():
        return None
    return Certificate.from_json(read_json(path), str(path))


def carried_certificate(folder: Path, version: str, copy: str) -> Certificate | None:
    """The folder's, if it is of the weights that it has, for a copy of them in another form.

    Args: version, copy: content versions of the two. Raises: as `read_certificate`.
    """
    found = read_certificate(folder)
    if found is None or found.quantized != version:
        return None
    return dataclasses.replace(found, quantized=copy)


def shipped_certificate(version: str, folder: Path = SHIPPED) -> Certificate | None:
    """The one that comes with this package for a version of quantized weights, or None.

    It is for catalog models whose weights are rounded while they are loaded.
    """
    for path in sorted(folder.glob("*.json")):
        found = Certificate.from_json(read_json(path), str(path))
        if found.quantized == version:
            return found
    return None
