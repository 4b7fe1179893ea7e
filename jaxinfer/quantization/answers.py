"""The A/B record: what two models say to the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpoints.certificate import Answer
from jaxinfer.quantization.greedy import Rows, greedy, num_steps
from jaxinfer.quantization.standard_prompts import Prompt
from jaxinfer.quantization.subject import Subject

NUM_TOKENS = 48  # of an answer


def answers_of(
    original: Subject,
    quantized: Subject,
    prompts: Sequence[Prompt],
    *,
    num_tokens: int = NUM_TOKENS,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Answer, ...]:
    """Greedy answers of both, in the order of the prompts.

    Args:
        num_tokens: of an answer, at most.
        on_step: called at most `answer_steps` times.
    Raises: as `greedy`; InvalidRequest for messages that the chat template refuses.
    """
    token_ids = [prompt.token_ids(original.tokenizer) for prompt in prompts]
    ours = _texts(original, token_ids, num_tokens, on_step)
    theirs = _texts(quantized, token_ids, num_tokens, on_step)
    return tuple(
        Answer(prompt.shown, first, second)
        for prompt, first, second in zip(prompts, ours, theirs, strict=True)
    )


def answer_steps(
    prompts: Sequence[Prompt], subject: Subject, *, num_tokens: int = NUM_TOKENS
) -> int:
    """Of both models together, at most."""
    return 2 * num_steps([prompt.token_ids(subject.tokenizer) for prompt in prompts], num_tokens)


def _texts(
    subject: Subject,
    token_ids: Sequence[Sequence[int]],
    num_tokens: int,
    on_step: Callable[[], None],
) -> list[str]:
    rows = Rows(
        subject.decoder,
        subject.params,
        num_rows=len(token_ids),
        num_positions=num_steps(token_ids, num_tokens),
        round_kv=subject.round_kv,
    )
    end_ids = subject.tokenizer.eos_token_ids
    found = greedy(rows, token_ids, num_tokens, end_ids=end_ids, on_step=on_step)
    return [subject.tokenizer.decode(ids) for ids in found]
