"""One engine from its first request to its last, and what its runner was given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.exactness.probes import neighbours
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import Request
from tests.bench.exactness.fake_subject import PAGE_SIZE, PROBES, fake_lab
from tests.fakes import VOCAB_SIZE, greedy_continuation

PROMPT = (5, 7, 9)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, ignore_eos=True)


def test_a_request_is_run_to_its_end():
    session = fake_lab().subject.session()
    first = session.submit(Request("x", PROMPT, GREEDY))
    second = session.submit(Request("x", PROMPT, GREEDY), max_tokens=2)
    session.drain()
    assert session.trace(first).token_ids == greedy_continuation(PROMPT, 20)
    assert session.trace(second).token_ids == greedy_continuation(PROMPT, 2)
    assert session.is_over(first)
    assert not session.was_aborted(first)
    assert session.num_cached(first) == session.num_preemptions(first) == 0


def test_a_token_is_seen_where_it_was_drawn():
    session = fake_lab().subject.session()
    mine = session.submit(Request("x", PROMPT, GREEDY))
    session.step_until(lambda: session.num_out(mine) > 1)
    other = session.submit(Request("y", tuple(range(40)), GREEDY), max_tokens=3)
    session.drain()
    seen = list(session.sightings(mine))
    assert [s.place for s in seen] == list(range(20))
    assert (seen[0].step.kind, seen[0].num_new, seen[0].pages) == ("prefill", 3, (0,))
    assert {s.step.kind for s in seen[1:]} == {"decode", "prefill"}
    assert all(s.num_new == 1 for s in seen[1:])
    assert {s.row for s in seen} == {0}  # its context is the shorter one
    assert len(seen[-1].pages) == 2
    (rode,) = (s for s in seen[1:] if s.step.kind == "prefill")
    assert rode.step.num_new == (1, 40)
    assert rode.step.bucket == 64
    assert {s.row for s in session.sightings(other) if s.step.kind == "decode"} == {1}


def test_an_aborted_request_has_ended():
    session = fake_lab().subject.session()
    request_id = session.submit(Request("x", PROMPT, GREEDY))
    session.step_until(lambda: session.num_out(request_id) > 3)
    session.abort(request_id)
    session.drain()
    assert session.was_aborted(request_id)
    assert 3 < session.num_out(request_id) < 20


def test_choices_have_traces_of_their_own():
    session = fake_lab().subject.session()
    drawn = Request("x", PROMPT, replace(GREEDY, temperature=1.0, seed=3))
    request_id = session.submit(drawn, n=3)
    session.drain()
    answers = [session.trace(request_id, i).token_ids for i in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert len(list(session.sightings(request_id))) == 20  # the first one's


def test_pages_can_be_put_into_another_order():
    lab = fake_lab()
    session = lab.subject.session(shuffle=lab.rng(0))
    request_id = session.submit(Request("x", (1,) * (4 * PAGE_SIZE), GREEDY))
    session.drain()
    pages = next(session.sightings(request_id)).pages
    assert len(set(pages)) == 4
    assert list(pages) != sorted(pages)


def test_neighbours_are_as_asked_for_and_always_the_same():
    def some() -> list[Request]:
        return neighbours(
            np.random.default_rng(4),
            50,
            VOCAB_SIZE,
            lengths=(2, 9),
            num_out=(3, 5),
            kinds=["drawn"],
        )

    requests = some()
    assert requests == some()
    assert {len(request.token_ids) for request in requests} == set(range(2, 10))
    assert {request.sampling.max_tokens for request in requests} == {3, 4, 5}
    assert {request.sampling.temperature for request in requests} == {0.9}
    assert all(0 <= i < VOCAB_SIZE for request in requests for i in request.token_ids)


def test_probes_differ_in_length_kind_and_seed():
    assert len({p.name for p in PROBES}) == len(PROBES)
    assert len({p.request.sampling.seed for p in PROBES}) == len(PROBES)
    assert [p.is_drawn for p in PROBES] == [False, True, True, True, True, False]
