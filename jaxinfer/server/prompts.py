"""What a client sent as a prompt -> token ids, or why not.

Tokenizer work: to be called on a thread of the pool, never on the event loop.
"""

from __future__ import annotations

from jaxinfer.chat_template import RESERVED_NAMES
from jaxinfer.errors import ContextLengthExceeded, InvalidRequest
from jaxinfer.server.protocol import ChatRequest
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.tool_use import messages_for_template, offered_tools


def encode_chat(served: ServedModel, fields: ChatRequest) -> list[int]:
    """The prompt of a conversation. Raises: InvalidRequest."""
    continues = bool(fields.continue_final_message)
    begins = fields.add_generation_prompt
    if continues and begins:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    kwargs = fields.chat_template_kwargs or {}
    reserved = sorted(kwargs.keys() & (RESERVED_NAMES | {"self"}))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs may not hold {', '.join(reserved)}",
            param="chat_template_kwargs",
        )
    tools = [tool.for_template() for tool in offered_tools(fields)]
    return served.tokenizer.encode_chat(
        messages_for_template(served, fields.messages),
        tools=tools or None,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        **kwargs,
    )


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> list[int]:
    """`token_ids` if all are in the vocabulary. Raises: InvalidRequest naming one that is not."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token ids must be from 0 to {vocab_size - 1}; got {token_id}", param=param
            )
    return token_ids


def check_length(num_tokens: int, max_model_len: int, param: str) -> None:
    """The engine checks it too, but on its own thread: far too long a prompt must not cost a step.

    Raises: ContextLengthExceeded if no token of output would fit behind the prompt.
    """
    if num_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"prompt has {num_tokens} tokens, but the model holds {max_model_len} with at least "
            f"one of output; shorten it to at most {max_model_len - 1} tokens",
            param=param,
        )
