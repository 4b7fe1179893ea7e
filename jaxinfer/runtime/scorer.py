"""Log-probabilities of a given text: what perplexity is made of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from jaxinfer.runtime.aot import Programs
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.steps import PrefillArrays
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from pallas_kernels.query_blocks import QueryBlocks

SCORE_TOKENS = 128  # of one chunk; its logits are float32[128, V]


class Scorer:
    """Runs texts through the prefill arithmetic, in chunks, on pages that it gives back.

    Args:
        pool: the pages of now.
        programs: makes the programs of scoring ready for a token bucket; called once, at first use.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: Callable[[], PagePool],
        buckets: Buckets,
        *,
        version: str,
        max_model_len: int,
        vocab_size: int,
        programs: Callable[[int], Programs],
    ):
        self._runner, self._pool, self._buckets = runner, pool, buckets
        self._version, self._max_model_len = version, max_model_len
        self._vocab_size = vocab_size
        self._make_programs = programs
        self._is_ready = False

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32[len - 1]: log-probability of each token but the first, given those before it.

        Raises: InvalidRequest for fewer than 2 tokens or unknown ones, ContextLengthExceeded for
            too many, Overloaded while running sequences hold the pages that it needs.
        """
        ids = self._ids(token_ids)
        if len(ids) < 2:
            raise InvalidRequest(f"a text to score needs 2 or more tokens; got {len(ids)}")
        if len(ids) > self._max_model_len:
            raise ContextLengthExceeded(
                f"the text has {len(ids)} tokens, but the model holds {self._max_model_len}"
            )
        pool = self._pool()
        num_pages = pool.pages_for(len(ids) - 1)
        if num_pages > pool.num_available:
            raise Overloaded(
                f"scoring needs {num_pages} pages, {pool.num_available} are free; "
                "wait for running requests to end",
                retry_after_s=1.0,
            )
        pages = pool.allocate(num_pages)
        try:
            return self._score(ids, pages)
        finally:
            pool.release(pages)

    def _ids(self, token_ids: Sequence[int]) -> np.ndarray:
        """int32[len], inside the vocabulary: the device would read past the embedding."""
        try:
            ids = np.array(array("i", token_ids), np.int32)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"a text to score must hold token ids: {error}") from error
        for token_id in (ids.min(initial=0), ids.max(initial=0)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"a text to score must hold ids in [0, {self._vocab_size}); got {token_id}"
                )
        return ids

    def _score(self, ids: np.ndarray, pages: list[int]) -> np.ndarray:
        bucket = self._buckets.tokens_for(min(SCORE_TOKENS, self._buckets.max_tokens))
        if not self._is_ready:
            self._runner.add_programs(self._make_programs(bucket))
            self._is_ready = True
        table = np.zeros((self._buckets.max_rows, self._buckets.max_pages_per_seq), np.int32)
        table[0, : len(pages)] = pages
        out = np.empty(len(ids) - 1, np.float32)
        for start in range(0, len(out), bucket):
            chunk = ids[start : min(start + bucket, len(out))]
            targets = np.zeros(bucket, np.int32)
            targets[: len(chunk)] = ids[start + 1 : start + 1 + len(chunk)]
            arrays = self._arrays(chunk, start, bucket, table)
            logprobs = self._runner.score_chunk(self._version, bucket, arrays, targets)
            out[start : start + len(chunk)] = logprobs[: len(chunk)]
        return out

    def _arrays(
        self, chunk: np.ndarray, start: int, bucket: int, table: np.ndarray
    ) -> PrefillArrays[np.ndarray]:
        """One sequence's tokens from position `start`, as wide blocks."""
        buckets = self._buckets
        width = buckets.block_q(bucket)
        wide = np.full((buckets.wide_blocks(bucket), width), bucket, np.int32)
        wide.reshape(-1)[: len(chunk)] = np.arange(len(chunk))
        narrow = np.full(buckets.max_rows, bucket, np.int32)
        blocks = QueryBlocks(
            narrow, np.array(0, np.int32), wide, np.array(-(-len(chunk) // width), np.int32)
        )
        nowhere = np.full(bucket, -1, np.int32)
        token_ids, positions = np.zeros(bucket, np.int32), nowhere.copy()
        token_ids[: len(chunk)] = chunk
        positions[: len(chunk)] = start + np.arange(len(chunk))
        rows, sample_at = np.zeros(bucket, np.int32), np.zeros(buckets.max_rows, np.int32)
        return PrefillArrays(token_ids, nowhere, positions, rows, table, blocks, sample_at)
