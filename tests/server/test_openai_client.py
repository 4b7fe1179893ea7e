"""The official client as a contract: what it parses and what it raises."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.house import MODEL, House, open_house


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert (card.object, card.owned_by) == ("model", "jaxinfer")


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "3"}], temperature=0
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("210", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_with_usage(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        max_completion_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "bcdefg"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "1"}],
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "0"
    assert len(logprobs.content[0].top_logprobs) == 3


def test_completions_with_two_choices_and_stop(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["a", "w"], n=2, stop=["z", "ef"])
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "bcd", "stop"),
        (1, "bcd", "stop"),
        (2, "xy", "stop"),
        (3, "xy", "stop"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2


def test_completions_stream(client: openai.OpenAI):
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=4, stream=True)
    assert "".join(c.choices[0].text for c in stream) == "bcde"


def test_errors_are_of_the_clients_own_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a" * 400)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_a_stream_that_is_closed_early_frees_its_pages(house: House, client: openai.OpenAI):
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    house.wait_until_idle(2.0)


def test_an_error_event_inside_a_stream_is_raised():
    with open_house() as house, openai.OpenAI(base_url=f"{house.url}/v1", api_key="x") as client:
        house.runner.step_s = 0.02
        stream = iter(
            client.completions.create(model=MODEL, prompt="a", max_tokens=99, stream=True)
        )
        next(stream)
        house.runner.fail_with = RuntimeError("bad step")
        with pytest.raises(openai.APIError, match="bad step"):
            for _ in stream:
                pass


def test_the_key_is_checked():
    with open_house(api_keys=("secret",)) as house:
        url = f"{house.url}/v1"
        with openai.OpenAI(base_url=url, api_key="secret") as good:
            assert good.models.list().data[0].id == MODEL
        with (
            openai.OpenAI(base_url=url, api_key="wrong") as bad,
            pytest.raises(openai.AuthenticationError),
        ):
            bad.models.list()
