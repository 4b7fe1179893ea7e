"""Who is let into the house: by seats, by tokens, and by whether there is time.

Pure: the clock is an argument. Everything here happens on one event loop.

A call gets a `Permit` before its body is read, as far as its headers tell its class; `settle` says
how much it is when the body has been parsed, `charge` when its prompts are tokens. Each may refuse
it, in microseconds, with the time to come back (service_rate.py).

Seats: every open choice takes one of `max_requests`, queued or running. The last ones are for
better classes: an eighth of them for each better class there is, half at most in all. So with 256
and three classes, batch finds room while fewer than 192 are taken, normal below 224, interactive
below 256. A class's own `max_requests` counts its own only.

Tokens: those of the prompts and those that may still be produced; an eighth is kept in the same
way. A call that is larger than the bound by itself gets in when nothing else is open.

Time: a call whose time limit cannot be met is refused at once (forecast.py says how that is known,
and why it does not refuse for ever). What it would have taken goes to those who can still be served
in time; without that, an overloaded server works on requests that end too late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from jaxinfer.errors import DeadlineExceeded, InvalidRequest, Overloaded
from jaxinfer.server.forecast import Estimate, Forecast, Leaving, Ticket
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.service_rate import ServiceRate
from jaxinfer.server.time_limits import NO_LIMITS, TimeLimits

KEPT_SHARE, MAX_KEPT_SHARE = 1 / 8, 1 / 2  # for each better class; in all


class Admission:
    """What is open, and the bounds of it.

    Args:
        max_requests: choices, queued and running together.
        max_tokens: of prompts, and still to produce; None: no bound.
        classes: the default classes, if none are given.
        num_seats: sequences that can run together; None: not known.
        clock: seconds.
    """

    def __init__(
        self,
        max_requests: int,
        *,
        max_tokens: int | None = None,
        classes: PriorityClasses | None = None,
        num_seats: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.classes = classes or PriorityClasses()
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.forecast = Forecast(num_seats, clock=clock)
        self.rate = ServiceRate(clock)
        self._open = dict.fromkeys(self.classes.names, 0)
        self._tokens = dict.fromkeys(self.classes.names, 0)

    @property
    def num_open(self) -> int:
        """Choices that are queued or running."""
        return sum(self._open.values())

    def num_open_of(self, name: str) -> int:
        return self._open[name]

    def open_tokens_of(self, name: str) -> int:
        """Of a class: prompt tokens of its calls, and tokens that they may still produce."""
        return self._tokens[name]

    def acquire(
        self,
        presumed: PriorityClass | None = None,
        *,
        best: PriorityClass | None = None,
        limits: TimeLimits = NO_LIMITS,
    ) -> Permit:
        """Room for one choice, until the permit is released.

        Args:
            presumed: the class that it counts for; None: the default class.
            best: the class whose bounds it is held to, if it may yet turn out to be better.
            limits: the time that is left, as far as it is known; nothing is taken for its own work.
        Raises: Overloaded with the time to come back.
        """
        presumed = presumed or self.classes.default
        permit = Permit(self, presumed)
        self.check_room(best or presumed, 1, {})
        self.check_time(best or presumed, 0, limits)
        permit.take(1)
        return permit

    def most(self, asked: PriorityClass) -> int:
        """Choices that a class can have open, with nobody else in the house."""
        room = self._bound(asked, self.max_requests)
        return room if asked.max_requests is None else min(room, asked.max_requests)

    def check_room(self, asked: PriorityClass, count: int, own: dict[str, int]) -> None:
        """For Permit. `own`: what it has already, by class. Raises: Overloaded."""
        num_open, bound = self.num_open - sum(own.values()), self._bound(asked, self.max_requests)
        if num_open + count > bound:
            raise self.refusal(
                asked,
                count,
                f"{num_open} requests are queued or running, of at most {bound} for class "
                f"{asked.name!r}",
            )
        of_class, cap = self._open[asked.name] - own.get(asked.name, 0), asked.max_requests
        if cap is not None and of_class + count > cap:
            raise self.refusal(
                asked,
                count,
                f"{of_class} requests of class {asked.name!r} are queued or running, of at most "
                f"{cap}",
            )

    def check_tokens(self, asked: PriorityClass, num_tokens: int) -> None:
        """For Permit. Raises: Overloaded."""
        if self.max_tokens is None:
            return
        num_open, bound = sum(self._tokens.values()), self._bound(asked, self.max_tokens)
        if num_open and num_open + num_tokens > bound:
            raise self.refusal(
                asked,
                1,
                f"{num_open} tokens are open and this call may take {num_tokens}, of at most "
                f"{bound} for class {asked.name!r}",
                tokens=num_open + num_tokens - bound,
            )

    def check_time(
        self, asked: PriorityClass, num_tokens: float, left: TimeLimits
    ) -> Estimate | None:
        """Whether a choice of `num_tokens` could be done in the time that is left.

        Returns: by what that was judged.
        Raises: Overloaded with code "deadline".
        """
        if left == NO_LIMITS:
            return None
        estimate = self.forecast.estimate(asked.priority, num_tokens)
        if estimate is None:
            return None
        for what, seconds, limit in (
            ("finished", estimate.end_s, left.timeout_s),
            ("begun", estimate.wait_s * estimate.factor, left.queue_timeout_s),
        ):
            if limit is not None and seconds > limit:
                raise self.refusal(
                    asked,
                    1,
                    f"the request would be {what} in about {_shown(seconds)} s, and has "
                    f"{max(limit, 0.0):.1f} s; give it more time or ask for fewer tokens",
                    code="deadline",
                    at_least_s=seconds - limit,
                )
        return estimate

    def change(self, asked: PriorityClass, count: int, num_tokens: int) -> None:
        """For Permit: takes or, below 0, gives back."""
        self._open[asked.name] += count
        self._tokens[asked.name] += num_tokens
        if count > 0:
            self.rate.on_admitted()

    def refusal(
        self,
        asked: PriorityClass,
        count: int,
        why: str,
        *,
        tokens: int = 0,
        code: str = "overloaded",
        at_least_s: float = 0.0,
    ) -> Overloaded:
        """The error, which counts as a refusal."""
        seconds = self.rate.retry_after_s(count, tokens, asked.priority, at_least_s)
        self.rate.on_refused(asked.priority)
        return Overloaded(f"{why}; try again in {seconds:.0f} s", retry_after_s=seconds, code=code)

    def _bound(self, asked: PriorityClass, most: int) -> int:
        """`most` less what is kept for better classes."""
        num_better = sum(c.priority < asked.priority for c in self.classes.classes)
        share = min(KEPT_SHARE, MAX_KEPT_SHARE / max(len(self.classes.classes) - 1, 1))
        return most - math.floor(most * share * num_better)


class Permit:
    """Room for one call; a context manager. Releasing it again does nothing."""

    def __init__(self, admission: Admission, asked: PriorityClass):
        self.priority_class = asked
        self._admission = admission
        self._count = 0
        self._num_tokens = 0  # of the open ones, those of this call
        self._ticket: Ticket | None = None

    def take(self, count: int) -> None:
        """For Admission, which has checked that there is room."""
        self._admission.change(self.priority_class, count, 0)
        self._count += count

    def settle(
        self,
        asked: PriorityClass,
        count: int,
        *,
        param: str,
        num_tokens: int = 0,
        limits: TimeLimits = NO_LIMITS,
    ) -> None:
        """What the call is, once that is known; again when another version answers instead.

        Args:
            count: choices in all.
            param: the request field that asks for so many.
            num_tokens: that each choice may produce.
            limits: the time that is left.
        Raises: Overloaded, and the permit stays as it is; InvalidRequest when `count` can never
            fit.
        """
        admission = self._admission
        self._unsettle()
        if count > admission.most(asked):
            raise InvalidRequest(
                f"the call asks for {count} choices (prompts times n); at most "
                f"{admission.most(asked)} fit; split it",
                param=param,
            )
        admission.check_room(asked, count, {self.priority_class.name: self._count})
        estimate = admission.check_time(asked, num_tokens, limits)
        admission.change(self.priority_class, -self._count, 0)
        self.priority_class, self._count = asked, 0
        self.take(count)
        self._ticket = admission.forecast.enter(asked.priority, count, count * num_tokens, estimate)

    def _unsettle(self) -> None:
        """As it was before `settle`, but for the class and the number of choices."""
        self._give_back_tokens(self._num_tokens)
        if self._ticket is not None:
            self._admission.forecast.leave(self._ticket, "left")
            self._ticket = None

    def charge(self, num_prompt_tokens: int) -> None:
        """The prompts' tokens, all together, once they are known; after `settle`.

        Raises: Overloaded.
        """
        num_tokens = num_prompt_tokens + (0 if self._ticket is None else self._ticket.tokens_left)
        self._admission.check_tokens(self.priority_class, num_tokens)
        self._admission.change(self.priority_class, 0, num_tokens)
        self._num_tokens += num_tokens

    def produced(self, num_tokens: int) -> None:
        """So many tokens of the call have come. The first ones say that it no longer waits."""
        if self._ticket is None or not num_tokens:
            return
        self._admission.forecast.produced(self._ticket, num_tokens)
        self._admission.rate.on_tokens(num_tokens)
        self._give_back_tokens(num_tokens)

    def fail(self, error: BaseException | None) -> None:
        """Releases after what ended the call; None: it ended by itself."""
        if error is None:
            self.release("ended")
        elif isinstance(error, DeadlineExceeded):
            self.release("late")
        else:
            is_refused = isinstance(error, InvalidRequest | Overloaded)
            self.release("refused" if is_refused else "left")

    def release(self, how: Leaving | Literal["refused"] = "ended") -> None:
        """Args: how: "refused" says nothing about the server, "left" not how long requests take."""
        admission, count = self._admission, self._count
        self._count = 0
        if not count:
            return
        if how != "refused":
            admission.rate.on_ended(count)
            admission.rate.on_tokens(self._num_tokens)
        self._give_back_tokens(self._num_tokens)
        admission.change(self.priority_class, -count, 0)
        if self._ticket is not None:
            admission.forecast.leave(self._ticket, "left" if how == "refused" else how)

    def _give_back_tokens(self, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.change(self.priority_class, 0, -num_tokens)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.fail(error)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 3600 else "more than 3600"
