"""`python -m bench.aot_report`: what our kernels and whole steps compile to, for GPUs not at hand.

Registers, spills, shared memory, tensor-core instructions and widths of loads of each kernel; the
launches, memory and copies of the whole prefill and decode step of a 7B-shaped model; and what such
a model leaves for its KV pool on several cards. Nothing is run, so there is no speed here.
`make test-aot` makes the environment, and asserts what has to hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from bench.aot import table
from bench.aot.cases import cases
from bench.aot.compiler import NoPlugin, prepare_environment
from bench.aot.facts import Facts
from bench.aot.laboratory import Laboratory
from bench.aot.memory import CARDS, Room, rooms
from bench.aot.programs import FORMATS, NUM_LAYERS, ModelPrograms
from bench.aot.targets import TARGETS
from bench.aot.toolchain import Toolchain, ToolError
from bench.pattern import pattern
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.program_memory import ProgramMemory, programs_bytes
from jaxinfer.server.flags import count


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.aot_report", description=__doc__)
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="all", help="(default: all)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json: lines")
    parser.add_argument(
        "--only", type=pattern, default=re.compile(""), help="a regular expression of names"
    )
    parser.add_argument("--layers", type=count, default=NUM_LAYERS, help="(default: 32)")
    return parser.parse_args(argv)


class Report:
    """Looks at everything on one GPU, and prints what it finds."""

    def __init__(self, laboratory: Laboratory, settings: argparse.Namespace):
        self._laboratory, self._settings = laboratory, settings
        self._is_json = settings.format == "json"

    def lines(self) -> Iterator[str]:
        """Kernels, then whole steps, then memory, if all of the model's programs were looked at.

        Raises: ToolError.
        """
        laboratory, layers = self._laboratory, self._settings.layers
        if not self._is_json:
            yield from table.target_header(laboratory.target, jax.__version__)
        for facts in self._examined([laboratory.compiler.case(case) for case in cases()]):
            yield from self._shown(facts, table.case_block)
        found: list[Room] = []
        memories: dict[str, ProgramMemory] = {}
        for weights in FORMATS:
            model = ModelPrograms(laboratory.compiler, num_layers=layers, weights=weights)
            largest = model.largest()
            for facts in self._examined([p for p in largest if p.name not in memories]):
                memories[facts.name] = facts.memory
                yield from self._shown(facts, table.program_block)
            if all(program.name in memories for program in largest):
                found += self._rooms(model, {p.name: memories[p.name] for p in largest})
        if self._is_json:
            yield from (json.dumps(dataclasses.asdict(room)) for room in found)
        elif found:
            yield from table.memory_rows(found, layers)

    def _examined(self, programs: Sequence[Program]) -> Iterator[Facts]:
        wanted = [program for program in programs if self._settings.only.search(program.name)]
        return self._laboratory.examine_all(wanted)

    def _rooms(self, model: ModelPrograms, memories: Mapping[str, ProgramMemory]) -> Iterator[Room]:
        """Of a model whose largest programs these are."""
        needed = programs_bytes(memories, model.batch_bytes())
        cards = CARDS[self._laboratory.target.name]
        config = model.decoder.config
        return rooms(config, model.weights, model.decoder.params_bytes, needed, cards)

    def _shown(self, facts: Facts, block: Callable[[Facts], Iterator[str]]) -> Iterator[str]:
        if self._is_json:
            yield json.dumps({"target": self._laboratory.target.name, **facts.as_json()})
        else:
            yield from block(facts)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    settings = parse(argv)
    chosen = TARGETS.values() if settings.target == "all" else [TARGETS[settings.target]]
    prepare_environment()
    try:
        tools = Toolchain.find()
        for target in chosen:
            for line in Report(Laboratory(target, tools), settings).lines():
                print(line, flush=True)
    except (NoPlugin, ToolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
