"""All cases and all checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.kernels import attention, experts, kv_writes, products, rows
from bench.kernels.case import Case, Check
from bench.kernels.sizes import Sizes
from pallas_kernels.backend import Backend

FAMILIES = (attention, products, experts, rows, kv_writes)


def cases(sizes: Sizes, chosen: re.Pattern[str]) -> Iterator[Case]:
    for family in FAMILIES:
        yield from (case for case in family.cases(sizes) if chosen.search(case.name))


def checks(sizes: Sizes, backend: Backend, chosen: re.Pattern[str]) -> Iterator[Check]:
    for family in FAMILIES:
        yield from (check for check in family.checks(sizes, backend) if chosen.search(check.name))
