"""In which form a checkpoint's weights are served, and what that is known to cost.

Decides from the checkpoint's files and the package's own certificates, before a weight is read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from checkpoints.certificate import Certificate, read_certificate, shipped_certificate
from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat, quantization_of
from checkpoints.rounded_version import rounded_version
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError

log = logging.getLogger(__name__)

ON_THE_FLY = {
    "int8": Quantization(WeightFormat(8)),
    "int4": Quantization(WeightFormat(4, 64, has_zero=True)),
}
"""Formats that weights are rounded to while they are loaded, without any data."""
FASTEST = ("int8",)
"""Of these, what `auto` tries on a CPU, the fastest first. Four bits are held one in a byte there
(Arithmetic.is_unpacked): no faster, and worse."""


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """How the weights are kept from here on."""

    quantization: Quantization | None  # None: as floats
    version: str  # of the weights as they are kept: other forms of one file are other versions
    is_rounded: bool = False  # while they are loaded
    certificate: Certificate | None = None

    def line(self) -> str:
        """For people: the form and its price."""
        if self.quantization is None:
            return "not quantized"
        if self.certificate is not None:
            return self.certificate.line()
        weights = self.quantization.weights
        name = "float" if weights is None else weights.name
        return f"{name}{' by rounding' if self.is_rounded else ''}: no certificate, cost unknown"


def choose_weights(
    source: ModelSource, checkpoint: Checkpoint, *, is_int8_fast: bool
) -> WeightChoice:
    """As the checkpoint has them, as the user asks, or the fastest form that is known to be good.

    Args:
        is_int8_fast: whether int8 products are faster here than those of floats, so that float
            weights may be rounded unasked, if a certificate of ours says what it costs.
    Raises: ConfigError for a quantized checkpoint that is to be quantized otherwise,
        CheckpointError for one that costs more than `source.max_kl`, or nobody knows how much.
    """
    found = quantization_of(checkpoint.config, str(checkpoint.path))
    if found is not None:
        return _as_found(source, checkpoint, found)
    if source.quantization in ON_THE_FLY:
        return _as_asked(source, checkpoint)
    if source.quantization == "auto" and is_int8_fast:
        for name in FASTEST:
            choice = _rounded(checkpoint, ON_THE_FLY[name])
            if choice.certificate is not None and choice.certificate.kl <= source.max_kl:
                return choice
    return WeightChoice(None, checkpoint.version)


def _as_found(source: ModelSource, checkpoint: Checkpoint, found: Quantization) -> WeightChoice:
    path = checkpoint.path
    if source.quantization != "auto":
        raise ConfigError(
            f"{path} is quantized already; leave quantization at auto (--quantization auto), "
            f"got {source.quantization}"
        )
    certificate = read_certificate(path)
    fault = None
    if certificate is None:
        fault = "none"
    elif certificate.quantized != checkpoint.version:
        fault = f"one of {certificate.quantized}"
        certificate = None
    if fault is not None and checkpoint.quantized_by is not None:
        log.warning(
            "%s: weights are as %s quantized them, without a certificate: what that costs is not "
            "known; python -m checkpoints compare measures it",
            path,
            checkpoint.quantized_by,
        )
    elif fault is not None:
        message = f"{path}: expected a certificate of these weights ({checkpoint.version})"
        if source.max_kl < math.inf:
            raise CheckpointError(
                f"{message}, found {fault}; quantize again, or serve it whatever it costs with "
                "--max-kl inf"
            )
        log.warning("%s, found %s", message, fault)
    choice = WeightChoice(found, checkpoint.version, certificate=certificate)
    _check_cost(source, checkpoint, choice)
    return choice


def _as_asked(source: ModelSource, checkpoint: Checkpoint) -> WeightChoice:
    choice = _rounded(checkpoint, ON_THE_FLY[source.quantization])
    if choice.certificate is None:
        log.warning(
            "%s: weights are rounded to %s without a certificate: what that costs is not known; "
            "python -m checkpoints quantize measures it",
            checkpoint.path,
            source.quantization,
        )
    _check_cost(source, checkpoint, choice)
    return choice


def _rounded(checkpoint: Checkpoint, quantization: Quantization) -> WeightChoice:
    version = rounded_version(checkpoint.version, quantization)
    return WeightChoice(quantization, version, True, shipped_certificate(version))


def _check_cost(source: ModelSource, checkpoint: Checkpoint, choice: WeightChoice) -> None:
    found = choice.certificate
    if found is None or source.max_kl == math.inf:
        return
    if not found.kl <= source.max_kl:  # so that NaN does not pass
        raise CheckpointError(
            f"{checkpoint.path}: expected a KL divergence of at most {source.max_kl:g} nats per "
            f"token from the original, found {found.kl:.4g} by its certificate; serve another "
            f"form, or raise --max-kl"
        )
