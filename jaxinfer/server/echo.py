"""Plain completions that repeat their prompt (`echo`), with or without anything behind it.

No sending, no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import FinishReason

if TYPE_CHECKING:
    from jaxinfer.server.protocol import CompletionRequest
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.writers import Writer


async def prompt_texts(served: ServedModel, fields: CompletionRequest) -> list[str]:
    """The text of each prompt; of token ids, what they spell."""
    skips = fields.skip_special_tokens is not False
    return await served.off_loop(
        lambda: [
            p if isinstance(p, str) else served.tokenizer.decode(p, skip_special_tokens=skips)
            for p in fields.prompts()
        ]
    )


class EchoOnly:
    """In place of a Reading, where no token is asked for: every choice ends at once."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self._is_read = False

    async def next(self, timeout_s: float | None) -> list[tuple[int, RequestOutput]] | None:
        """Like `Reading.next`."""
        if self._is_read:
            return None
        self._is_read = True
        return [
            (i, RequestOutput("", i, "", (), (), FinishReason.LENGTH))
            for i in range(self.writer.shape.num_choices)
        ]
