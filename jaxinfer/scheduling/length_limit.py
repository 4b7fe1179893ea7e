"""How long a sequence may become, and the refusal of what can never fit.

Host only: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.errors import ContextLengthExceeded


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The two walls: the model's context and the KV pool."""

    max_model_len: int  # tokens of prompt and output
    num_pool_tokens: int  # tokens whose KV the whole pool holds

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of the longest sequence; the last token drawn needs no KV."""
        return min(self.max_model_len, self.num_pool_tokens + 1)

    def total_tokens(
        self, num_prompt_tokens: int, max_tokens: int | None, output_cap: int | None = None
    ) -> int:
        """Prompt and output tokens at which a sequence ends; without max_tokens all that fits.

        A pool smaller than the model's context ends the output early, with `length`. An output_cap
        takes the place of max_tokens.

        Raises: ContextLengthExceeded if the prompt leaves no room for one token, or the model's
            context none for max_tokens.
        """
        limit = self.max_total_tokens
        holder = "model" if limit == self.max_model_len else "KV pool"
        room = limit - num_prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"prompt has {num_prompt_tokens} tokens, but the {holder} holds {limit} with at "
                f"least one of output; shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
            )
        if output_cap is not None:
            return min(limit, num_prompt_tokens + output_cap)
        if max_tokens is None:
            return limit
        model_room = self.max_model_len - num_prompt_tokens
        if max_tokens > model_room:
            raise ContextLengthExceeded(
                f"prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, but the "
                f"model holds {self.max_model_len}; shorten the prompt or ask for at most "
                f"{model_room} tokens",
                param="max_tokens",
            )
        return min(num_prompt_tokens + max_tokens, limit)
