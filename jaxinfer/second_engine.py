"""A model of another shape, format or architecture beside the one that runs, in the same process.

It has an engine of its own: programs, weights, KV pool, scheduler, seeds and tokenizer. The two
share the device's memory, of which this one has what the first leaves, and the cores.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from checkpoints.checkpoint import Checkpoint
from jaxinfer.assembly import make_engine, make_runner
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.heap import trim_heap
from jaxinfer.models.decoder import Decoder
from jaxinfer.new_version import NewVersion
from jaxinfer.runtime.compile_counter import compiling_for_version
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import MemoryPlan, asked_bytes
from jaxinfer.runtime.program_set import ProgramSet, prepare_beside
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.weight_choice import WeightChoice
from jaxinfer.runtime.weights import load_weights
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.versions import ModelVersion


def load_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    choice: WeightChoice,
    decoder: Decoder,
    tokenizer: Tokenizer,
    budget: MemoryBudget,
    *,
    programs_dir: Path,
    running_model_len: int,
    load: Callable[[Checkpoint, Decoder], Params] = load_weights,
    on_progress: Callable[[str], None] = lambda phase: None,
    on_plan: Callable[[MemoryPlan], None] = lambda plan: None,
) -> NewVersion:
    """Plans, compiles or loads the programs, one at a time, reads the weights and allocates the
    pool. It takes long; XLA compiles on threads of its own. Whatever it raises, nothing of it stays
    on the device.

    Args:
        config: of the running engine, with the source of this model.
        checkpoint: stays the caller's to close.
        budget: what is left beside the running engine (`MemoryBudget.beside`).
        programs_dir: where compiled programs are kept.
        running_model_len: tokens of prompt and output in the running engine: where the length is
            open, the pool holds one such sequence.
        load: reads, checks and places the weights.
        on_progress: told each phase and each program that is ready, from threads of this work;
            what it raises ends the work, and is raised.
        on_plan: told the plan, in the end.
    Returns: with manner `engine`; its `discard` belongs to the time after the last step.
    Raises: ConfigError that says how much memory is missing, CheckpointError, what `load` raises.
    """

    def work() -> NewVersion:
        on_progress("compile")
        found = prepare_beside(
            config,
            decoder,
            budget,
            programs_dir,
            least_model_len=running_model_len,
            on_ready=lambda name: on_progress(f"program {name}"),
        )
        on_progress("load weights")
        params = jax.block_until_ready(load(checkpoint, decoder))
        on_progress("allocate KV pool")
        pages = jax.block_until_ready(found.make_pages())
        runner = make_runner(found, decoder, pages, params, choice.version)
        version = ModelVersion(choice.version, tokenizer, frozenset(checkpoint.eos_token_ids))
        engine = make_engine(config, found, decoder, runner, version)
        trim_heap()
        on_plan(found.plan)
        return NewVersion(
            model_version=version,
            manner="engine",
            root=config.source.model,
            generation_config=checkpoint.generation_config,
            max_model_len=found.plan.max_model_len,
            vocab_size=decoder.config.vocab_size,
            weights_bytes=found.plan.weights_bytes,
            lines=(choice.line(), *_lines(config, found, running_model_len)),
            install=_nowhere,
            discard=_discard(engine, runner),
            engine=engine,
        )

    try:
        with compiling_for_version():
            return work()
    except BaseException as error:
        _forget(error)
        raise


def _nowhere(engine: Engine) -> None:
    raise ValueError("a version with an engine of its own is not installed in another one")


def _discard(engine: Engine, runner: ModelRunner) -> Callable[[], None]:
    def discard() -> None:
        engine.close()
        runner.close()
        trim_heap()

    return discard


def _forget(error: BaseException) -> None:
    """Lets go of arrays: the frames of a failed work hold them while somebody has its error."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    trim_heap()


def _lines(config: EngineConfig, found: ProgramSet, running_model_len: int) -> tuple[str, ...]:
    """What was planned, and what is less than in the running engine, for people."""
    plan, programs = found.plan, found.programs
    lines = [
        f"an engine of its own: {plan.line()}",
        f"programs: {programs.num_loaded} loaded, {programs.num_compiled} compiled",
    ]
    asked = _asked_bytes(config, plan)
    if plan.pool_bytes + plan.page_bytes <= asked:
        lines.append(
            f"its KV pool has {plan.pool_bytes} of the {asked} bytes that were asked for: "
            "there is no room for more"
        )
    if plan.max_model_len < running_model_len:
        lines.append(
            f"it holds sequences of {plan.max_model_len} tokens, the running engine of "
            f"{running_model_len}"
        )
    return tuple(lines)


def _asked_bytes(config: EngineConfig, plan: MemoryPlan) -> int:
    """Of the pool, as far as all sequences can use it; 0 if it was to have what is left."""
    full = -(-plan.max_model_len // plan.page_size) * config.scheduler.max_num_seqs
    return min(asked_bytes(config, plan.budget) or 0, full * plan.page_bytes)
