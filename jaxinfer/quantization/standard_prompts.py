"""The fixed questions that every certificate shows the answers to. Texts of our own.

Changing one makes certificates harder to compare: add at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.tokenizer import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that the model is to answer, or a plain text that it is to continue."""

    messages: tuple[Message, ...] = ()
    text: str = ""  # without messages

    @property
    def shown(self) -> str:
        """For a report."""
        if not self.messages:
            return self.text
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Through the chat template; a model without one continues the text as it is shown."""
        if self.messages and tokenizer.has_chat_template:
            return tokenizer.encode_chat(self.messages)
        return tokenizer.encode(self.shown, allow_special=False)


def ask(*turns: str) -> Prompt:
    """A conversation whose first turn is the user's, then the assistant's, and so on."""
    roles = ("user", "assistant")
    return Prompt(tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)))


STANDARD_PROMPTS: Sequence[Prompt] = (
    ask("What is the capital of Portugal?"),
    ask("A shelf holds 4 rows of 12 jars. 9 jars break. How many are left? Show each step."),
    ask("Write a Python function that returns the second largest number of a list."),
    ask("Translate into French: The train leaves at seven, so please do not be late."),
    ask("List five things to check before a long walk in the mountains."),
    ask("Tell the beginning of a story about a lighthouse keeper who finds a letter."),
    ask("Explain to a child why ice floats on water."),
    ask(
        "My plant has yellow leaves.",
        "How often do you water it, and how much light does it get?",
        "Every day, and it stands at a dark window. What should I change?",
    ),
    ask("Rewrite in one sentence: We met. We talked for hours. In the end nobody agreed."),
    ask("Is 91 a prime number? Answer yes or no, then say why."),
    ask("中国最长的河是哪一条？请用一句话回答。"),
    ask("请把下面的句子翻译成英文：明天下午我们在图书馆门口见面。"),
    ask("用三句话写一个关于秋天的小故事。"),
    Prompt(text="The three primary colours of paint are"),
)
