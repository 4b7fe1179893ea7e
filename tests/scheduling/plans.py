"""What is explored: three requests in six pages of two tokens, or on two seats and in four pages.

Two begin with the same pages; one of them may not wait for ever. The third is of a better class, so
it comes before them in rank wherever it arrives, and has a deadline. The longest prompt takes more
than one step, all of them together outgrow the pool, and each needs a page more when it decodes.
"""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import Request
from tests.scheduling.world import Setup


def request(name: str, prompt: tuple[int, ...], max_tokens: int, *, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, prompt, sampling, priority=priority)


def same_digest(parent: bytes, tokens: bytes) -> bytes:
    """All prefixes collide."""
    return b"same"


SETUP = Setup(num_pages=6, page_size=2, max_num_seqs=3, max_num_batched_tokens=3, max_model_len=12)
TIGHT = replace(SETUP, num_pages=4, max_num_seqs=2, max_num_batched_tokens=4)
CANARY = replace(SETUP, shares=(("v1", 0.99), ("v2", 0.01)))
COLLIDING = replace(SETUP, digest=same_digest)
SHORT = (
    request("a", (1, 2, 3, 4, 5, 6), 2),
    replace(request("b", (1, 2, 6, 5), 2), queue_deadline_s=10.0),
    replace(request("c", (6, 5), 2, priority=-1), deadline_s=10.0),
)
LONG = (
    request("a", (1, 2, 3, 4, 5), 3),
    replace(request("b", (1, 2, 3, 4), 4), queue_deadline_s=10.0),
    replace(request("c", (6, 5), 3, priority=-1), deadline_s=10.0),
)
LONG_ANSWERS = (request("a", (1, 2), 7), request("b", (6, 5, 1), 7))
CLASSES = (
    replace(request("a", (1, 2, 3, 4, 5), 3, priority=1), queue_deadline_s=5.0),
    request("b", (1, 2, 3, 4), 3),
    request("c", (6, 5, 4), 2, priority=-1),
)
