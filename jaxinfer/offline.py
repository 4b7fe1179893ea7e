"""`generate()` and `LLM`: the engine from a script, without a thread or a server.

The same `Engine.step()` as the server's, so the same tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import Any

from jaxinfer.build import Built, build
from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.errors import InvalidRequest
from jaxinfer.guidance import Guidance
from jaxinfer.outputs import RequestOutput, TokenLogprob, Truncation
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.stats import RequestStats

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One choice of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # as many as tokens, when asked for
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    truncation: Truncation | None = None  # set if output_cap ended it

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.stats = output.stats
        self.truncation = output.truncation


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt and its choices; `text` and `token_ids` are the first one's."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


class LLM:
    """A loaded model.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate("The capital of France is", max_tokens=8, temperature=0)[0].text
    >>> llm.chat([{"role": "user", "content": "Hi"}], max_tokens=32).text

    Args:
        model: a path, a hub id, or a catalog name.
        config: everything else, as one object; or single fields of it by name (see config.py):
            LLM(max_num_seqs=8, kv_cache_bytes=2**28).
    Raises: CheckpointError, ConfigError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        **fields: Any,
    ):
        if model is not None:
            fields["model"] = model
        self._built: Built = build(replace(config or EngineConfig(), **fields))
        self._engine = self._built.engine
        self._guidance = Guidance(self._built.tokenizer, self._engine.vocab_size)
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # by request, of its iterator
        self.tokenizer = self._built.tokenizer
        self.max_model_len = self._built.max_model_len
        self.version = self._built.version

    @property
    def plan(self) -> MemoryPlan:
        """What weights, programs and KV pool take of the memory, and what the pool holds."""
        return self._built.plan

    def compile_events(self) -> dict[str, int]:
        """XLA compilations of this process: of its `startup`, and since then (`serving`: 0).

        Only the first `score` compiles a program, and what else in the process uses JAX.
        """
        return self._built.compile_events()

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[Generation]:
        """Continues each prompt; all run together.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling: for all prompts or one per prompt; or its fields by name: max_tokens=8,
                temperature=0, guided={"regex": "[0-9]+"}.
        Returns: one Generation per prompt, in order.
        Raises: InvalidRequest before anything runs; EngineFailure.
        """
        encoded = self._encode(prompts)
        requests = [
            self._request(ids, each)
            for ids, each in zip(encoded, _per_prompt(sampling, fields, len(encoded)), strict=True)
        ]
        collected = {
            request.request_id: [Completion(i) for i in range(request.sampling.n)]
            for request in requests
        }
        for output in self._run(requests):
            collected[output.request_id][output.index].add(output)
        return [
            Generation(request.token_ids, tuple(collected[request.request_id]))
            for request in requests
        ]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any
    ) -> Generator[RequestOutput]:
        """Continues one prompt, output by output; closing the iterator aborts it."""
        request = self._request(self._token_ids(prompt), _sampling(sampling, fields))
        return self._run([request])

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **fields: Any
    ) -> Generation:
        """Answers a conversation of {"role", "content"} messages, through the model's template."""
        token_ids = self.tokenizer.encode_chat(messages)
        return self.generate(token_ids, sampling, **fields)[0]

    def score(self, texts: Prompts) -> list[list[float]]:
        """Log-probability of each token of each text but the first, given those before it.

        Perplexity is exp(-mean). Raises: InvalidRequest for a text of fewer than 2 tokens.
        """
        return [self._built.scorer.score(ids).tolist() for ids in self._encode(texts)]

    def _run(self, requests: Sequence[Request]) -> Generator[RequestOutput]:
        """Submits all or none, and steps until all have ended.

        A step also serves the other iterators of this LLM; theirs waits in their own inboxes.
        """
        inbox: deque[RequestOutput] = deque()
        live: dict[str, int] = {}  # choices of each request that have not ended
        try:
            for request in requests:
                self._engine.submit(request)
                live[request.request_id] = request.sampling.n
                self._inboxes[request.request_id] = inbox
            while live:
                while not inbox:
                    self._step()
                output = inbox.popleft()
                if output.error is not None:
                    raise output.error
                if output.finish_reason is not None:
                    live[output.request_id] -= 1
                    if not live[output.request_id]:
                        del live[output.request_id]
                yield output
        finally:
            for request_id in live:
                self._engine.abort(request_id)
            for request in requests:
                self._inboxes.pop(request.request_id, None)

    def _step(self) -> None:
        for output in self._engine.step().outputs:
            self._inboxes[output.request_id].append(output)

    def _request(self, token_ids: Sequence[int], sampling: SamplingParams) -> Request:
        grammar = sampling.grammar
        return Request(
            request_id=f"offline-{next(self._ids)}",
            token_ids=tuple(token_ids),
            sampling=sampling,
            arrival_s=time.monotonic(),
            constraint=None if grammar is None else self._guidance.compile(grammar),
        )

    def _encode(self, prompts: Prompts) -> list[Sequence[int]]:
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
            prompts = [prompts]  # type: ignore[list-item]
        return [self._token_ids(prompt) for prompt in prompts]  # type: ignore[arg-type]

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not len(token_ids):  # an array of ids has no truth
            raise InvalidRequest("prompt must have at least 1 token; got none", param="prompt")
        return token_ids


def generate(
    prompts: Prompts, *, model: str = "smollm2-135m-instruct", **fields: Any
) -> list[Generation]:
    """Continues prompts with a model, which stays loaded for the next call.

    >>> jaxinfer.generate(["The capital of France is"], max_tokens=8, temperature=0)[0].text

    Args:
        prompts: a text, a list of token ids, or a list of either.
        model: a path, a hub id, or a catalog name.
        fields: of SamplingParams.
    """
    return _loaded(model).generate(prompts, **fields)


@lru_cache(maxsize=1)
def _loaded(model: str) -> LLM:
    return LLM(model)


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    fields: dict[str, Any],
    num_prompts: int,
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [_sampling(sampling, fields)] * num_prompts
    if fields:
        raise InvalidRequest(
            f"give sampling or its fields, not both; got sampling and {', '.join(fields)}"
        )
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"give one sampling for all prompts or one for each; got {len(sampling)} for "
            f"{num_prompts} prompts"
        )
    return sampling


def _sampling(sampling: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    if sampling is not None and fields:
        raise InvalidRequest(
            f"give sampling or its fields, not both; got sampling and {', '.join(fields)}"
        )
    if sampling is not None:
        return sampling
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise InvalidRequest(f"no such sampling field: {error}") from error
