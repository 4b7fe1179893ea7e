"""Results as plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.results import DISTURBED, MAX_TIMES, QUIET, Failure, Outcome, Result, Statistic

WIDTH = 100
NAME_WIDTH, LABEL_WIDTH, FIGURE_WIDTH = 8, 37, 9


class Shown(NamedTuple):
    """How a metric is shown."""

    label: str
    factor: float = 1.0
    digits: int = 1


MS, MIB = 1e3, 2.0**-20
METRICS = {
    "decode_tokens_per_s": Shown("tokens/s after the first"),
    "with_prompt_tokens_per_s": Shown("tokens/s"),
    "prefill_tokens_per_s": Shown("prompt tokens/s"),
    "ttft_s": Shown("first token, ms", MS),
    "output_tokens_per_s": Shown("output tokens/s"),
    "all_tokens_per_s": Shown("tokens/s, prompts counted too"),
    "miss_ttft_s": Shown("first token, prefix miss, ms", MS),
    "hit_ttft_s": Shown("first token, prefix hit, ms", MS),
    "miss_over_hit": Shown("miss / hit"),
    "peak_bytes": Shown("peak of this process, MiB", MIB, 0),
    "device_peak_bytes": Shown("peak of the device, MiB", MIB, 0),
    "process_bytes": Shown("planned: Python and libraries, MiB", MIB, 0),
    "weights_bytes": Shown("planned: weights, MiB", MIB, 0),
    "programs_bytes": Shown("planned: programs, MiB", MIB, 0),
    "kv_pool_bytes": Shown("planned: KV pool, MiB", MIB, 0),
    "over_plan_bytes": Shown("peak less plan, MiB", MIB, 0),
    "peak_over_plan": Shown("model's peak / plan", digits=3),
    "serving_compiles": Shown("compilations while serving", digits=0),
    "ready_s": Shown("from starting Python to READY, s", digits=2),
    "ready_cpu_s": Shown("CPU time of that, s", digits=2),
    "import_s": Shown("Python and imports of the server, s", digits=2),
    "import_jax_s": Shown("import JAX, and all the rest, s", digits=2),
    "find_model_s": Shown("find model, read its header, s", digits=2),
    "load_weights_s": Shown("load weights (beside compile), s", digits=2),
    "compile_s": Shown("load or compile programs, s", digits=2),
    "allocate_KV_pool_s": Shown("allocate KV pool (beside weights), s", digits=2),
    "num_compiled": Shown("programs compiled", digits=0),
    "num_loaded": Shown("programs loaded", digits=0),
    "cache_bytes": Shown("compiled programs on disk, MiB", MIB),
    "load_s": Shown("from starting Python, s", digits=2),
    "loaded_bytes": Shown("peak of that process, MiB", MIB, 0),
    "decode_1_rows_s": Shown("decode step of exactly 1 row, ms", MS),
    "decode_2_rows_s": Shown("of exactly 2 rows, ms", MS),
    "decode_4_rows_s": Shown("of exactly 4 rows, ms", MS),
    "decode_7_rows_s": Shown("of exactly 7 rows, ms", MS),
    "decode_8_rows_s": Shown("of 8 rows, the engine's smallest, ms", MS),
}


def header(context: Mapping[str, Any], num_reps: int) -> Iterator[str]:
    """What was measured on what, and the names of the columns."""
    yield f"{context['model']}; jaxinfer {context['jaxinfer']}, JAX {context['jax']}, " + (
        f"Python {context['python']}"
    )
    yield f"device {context['device']}; {context['cores']} cores of {context['cpu']}"
    yield f"repetitions: the {num_reps} quietest of up to {MAX_TIMES * num_reps}"
    yield ""
    yield _row("", "", ("median", "min", "max", "wall s", "CPU s", "others"))


def block(result: Outcome) -> Iterator[str]:
    """A measure: its name and cost, then a row for each metric."""
    if isinstance(result, Failure):
        yield _row(result.measure, result.title, ())
        yield f"{'':{NAME_WIDTH}}failed: {result.error}"
        return
    others = "?" if result.others is None else f"{result.others.max:.2f}"
    cost = (_seconds(result.wall_s), _seconds(result.cpu_s), others)
    mark = "*" if result.is_disturbed else ""
    yield _row(result.measure, result.title, ("", "", "", *cost)) + mark
    for name, statistic in result.metrics.items():
        yield _row("", METRICS[name].label, _figures(METRICS[name], statistic))


def footer(results: Sequence[Outcome]) -> Iterator[str]:
    """What the last column means."""
    yield ""
    yield (f"others: cores that other processes used; a repetition above {QUIET:g} is run again.")
    if any(isinstance(result, Result) and result.is_disturbed for result in results):
        yield f"*: above {DISTURBED:g}; not a measurement."


def _figures(shown: Shown, statistic: Statistic) -> tuple[str, ...]:
    values = (statistic.median, statistic.min, statistic.max)
    return tuple(f"{value * shown.factor:,.{shown.digits}f}" for value in values)


def _seconds(statistic: Statistic) -> str:
    return f"{statistic.median:,.1f}"


def _row(name: str, label: str, figures: tuple[str, ...]) -> str:
    cells = "".join(f"{figure:>{FIGURE_WIDTH}}" for figure in figures)
    return f"{name:{NAME_WIDTH}}{label:{LABEL_WIDTH}}{cells}".rstrip()
