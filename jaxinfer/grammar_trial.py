"""A process that tries a stranger's grammar before the server compiles it.

Host only: no JAX. The grammar library bounds its work by fuel, but not all of it: a few hundred
characters can keep it busy for ever, and a long chain of rules overflows its stack, which ends the
process that it runs in. So a server has every grammar compiled elsewhere first, against a clock and
on a smaller stack than its own; what gets through there, gets through here.

    a thread of the server:   vocabulary, grammar ->            -> accepted, refused, or gone
    the process:              index once      compile or die ->

The process starts with the first grammar, and anew after one that has ended it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.guidance import Guidance, VocabularySource
from jaxinfer.guided import Guided

TRIAL_S = 3.0  # for a grammar to compile
START_S = 30.0  # for the process to be there, with the vocabulary indexed
STACK_BYTES = 2**20  # half of the least that a thread of the server has
_PROBE = Guided("regex", "a?")


class SpelledVocabulary:
    """The bytes of a tokenizer's ids, without the tokenizer; can be sent to another process."""

    def __init__(self, tokenizer: VocabularySource):
        self.vocab_size = tokenizer.vocab_size
        self.eos_token_ids = tokenizer.eos_token_ids
        self.special_token_ids = tokenizer.special_token_ids
        self._spelled = [tokenizer.spelled(i) for i in range(tokenizer.vocab_size)]

    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return self._spelled[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Nothing: the library then takes the longest tokens."""
        return []


class GrammarTrial:
    """Safe to call from several threads; one grammar at a time is tried.

    Args:
        vocab_size: of the model.
        trial_s: seconds of wall clock for a grammar.
    """

    def __init__(self, tokenizer: VocabularySource, vocab_size: int, *, trial_s: float = TRIAL_S):
        self._tokenizer, self._vocab_size, self._trial_s = tokenizer, vocab_size, trial_s
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __call__(self, guided: Guided, param: str) -> None:
        """Returns if the grammar compiles.

        Raises: InvalidRequest with the library's words; or if it takes too long, or too deep a
            stack. EngineFailure if there is no process to try it in.
        """
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start()
            message = self._ask(guided, param, self._trial_s)
        if message:
            raise InvalidRequest(message, param=param)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._connection = cast("Connection", ours)  # on Windows it is another class
        args = theirs, SpelledVocabulary(self._tokenizer), self._vocab_size, self._trial_s
        self._process = context.Process(target=_serve, args=args, name="grammars", daemon=True)
        self._process.start()
        theirs.close()
        if self._ask(_PROBE, "guided", START_S):
            raise EngineFailure(f"the process that tries grammars was not there in {START_S:g} s")

    def _ask(self, guided: Guided, param: str, limit_s: float) -> str:
        """What is wrong with the grammar; "" if nothing is."""
        assert self._connection is not None
        with contextlib.suppress(EOFError, OSError):
            self._connection.send((guided, param))
            if self._connection.poll(limit_s + 1.0):
                return self._connection.recv()
        self._stop()
        return (
            f"{param}: not a usable {guided.kind}: it did not compile within {limit_s:g} s on a "
            f"stack of {STACK_BYTES / 2**20:g} MiB; use a simpler one, with shorter chains of rules"
        )

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


def _serve(
    connection: Connection, vocabulary: SpelledVocabulary, vocab_size: int, trial_s: float
) -> None:
    """The process. An alarm ends it in the middle of native code, also when nobody waits."""
    import resource  # not on Windows, where a server must still be importable

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(
        target=_answer, args=(connection, Guidance(vocabulary, vocab_size), trial_s), daemon=True
    )
    worker.start()
    worker.join()


def _answer(connection: Connection, guidance: Guidance, trial_s: float) -> None:
    guidance.warm()
    with contextlib.suppress(EOFError, OSError):
        while True:
            guided, param = connection.recv()
            signal.alarm(math.ceil(trial_s))
            message = ""
            try:
                guidance.compile(guided, param=param)
            except InvalidRequest as error:
                message = error.message
            signal.alarm(0)
            connection.send(message)
