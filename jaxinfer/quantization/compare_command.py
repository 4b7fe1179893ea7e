"""Two checkpoints by name to a report: the work behind the command."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from checkpoints.certificate import LayerError, read_certificate
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.resolve import resolve
from jaxinfer.config import KVCacheDtype
from jaxinfer.errors import ConfigError
from jaxinfer.quantization.compare import Comparison, check_vocabularies
from jaxinfer.quantization.cost import certificate_of, measured
from jaxinfer.quantization.document import REPORT_SUFFIXES, write_report
from jaxinfer.quantization.held_out_windows import read_held_out
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.prompt_file import read_prompts
from jaxinfer.quantization.standard_prompts import STANDARD_PROMPTS
from jaxinfer.quantization.subject import context_length, open_subject, tokenizer_of


@dataclass(frozen=True, slots=True)
class CompareOrder:
    """What is compared, and where the report goes."""

    models: tuple[str, str]  # paths, hub ids or catalog names; the first plays the original
    out: Path  # .html or .md
    prompts: Path | None  # None: the standard ones
    rounded_to: str | None  # of ON_THE_FLY: the second's float weights, while loading
    kv_cache: KVCacheDtype  # of the second
    certificate: Path | None  # where one of weights rounded while loading is written
    measuring: Measuring

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't be done, or could not be written in the end."""
        if self.out.suffix.lower() not in REPORT_SUFFIXES:
            raise ConfigError(
                f"the report must end in {' or '.join(REPORT_SUFFIXES)}; got {self.out}"
            )
        for path in (self.out, self.certificate):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{path} must lie in a folder that is there")
        if self.certificate is not None and (
            self.prompts is not None or self.rounded_to is None or self.kv_cache != "auto"
        ):
            raise ConfigError(
                "a certificate is of weights that are rounded while they are loaded, over the "
                "standard prompts; give --quantization, and neither --prompts nor --kv-cache-dtype"
            )


def compare_checkpoints(order: CompareOrder) -> Comparison:
    """Takes every measure and writes the report.

    Raises: CheckpointError, ConfigError and other JaxInferErrors; OSError.
    """
    asked = order.measuring
    prompts = STANDARD_PROMPTS if order.prompts is None else read_prompts(order.prompts)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(closing(_opened(name, asked.show_progress)))
            for name in order.models
        )
        check_vocabularies(one, other)
        tokenizer = tokenizer_of(one)
        length = min(context_length(one), context_length(other))
        held_out = read_held_out(asked, tokenizer, context_length=length)
        shown = asked.show_progress
        first = open_subject(one, order.models[0], tokenizer=tokenizer, show_progress=shown)
        second = open_subject(
            other,
            order.models[1],
            tokenizer=tokenizer,
            rounded_to=order.rounded_to,
            kv_cache=order.kv_cache,
            show_progress=shown,
        )
        layer_errors = _layer_errors(one, other)
    cost = measured(first, second, held_out, prompts, asked)
    found = Comparison(first, second, cost, layer_errors)
    write_report(order.out, f"{first.name} and {second.name}", list(found.blocks()))
    if order.certificate is not None:
        made = certificate_of(first, second, cost, method="rounding while loading")
        text = json.dumps(made.to_json(), indent=1, ensure_ascii=False)
        order.certificate.write_text(text, encoding="utf-8")
    return found


def _opened(name: str, show_progress: bool) -> Checkpoint:
    return open_checkpoint(resolve(name, show_progress=show_progress))


def _layer_errors(first: Checkpoint, second: Checkpoint) -> tuple[LayerError, ...]:
    """Of the second's certificate, if it was made from the first."""
    certificate = read_certificate(second.path) if second.path.is_dir() else None
    if certificate is None or certificate.original != first.version:
        return ()
    return certificate.layer_errors
