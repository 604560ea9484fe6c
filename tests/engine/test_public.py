"""How people talk to the server: an OpenAI client, SGLang's frontend language, the default vocabulary."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.park import on
from tests.support.witness import Witness

STORY = "Once upon a time there was a server that kept what it had read. " * 6
"""Nearly 400 bytes; the demo tokenizer makes a token of each."""


@pytest.fixture
def client(witness: Witness) -> Iterator[OpenAI]:
    """An OpenAI client of the server under test."""
    with OpenAI(base_url=witness.server.url + "/v1", api_key="none", timeout=60, max_retries=0) as openai:
        yield openai


def cached(usage: object) -> int:
    """`cached_tokens` of an OpenAI usage record."""
    details = getattr(usage, "prompt_tokens_details", None)
    return 0 if details is None else details.cached_tokens or 0


def check_second(witness: Witness, first: int, second: int, prompt_tokens: int) -> None:
    """The second of two equal requests reuses all but the last grid step."""
    if witness.config.hybrid:
        assert first == 0
        assert second == witness.G * ((prompt_tokens - 1) // witness.G) > 0


@on("public")
def test_chat(witness: Witness, client: OpenAI) -> None:
    def ask():
        return client.chat.completions.create(
            model="default",
            messages=[{"role": "system", "content": STORY}, {"role": "user", "content": "And then?"}],
            max_tokens=24,
            temperature=0,
        )

    first, second = ask(), ask()
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].message.content
    check_second(witness, cached(first.usage), cached(second.usage), second.usage.prompt_tokens)


@on("public")
def test_completion(witness: Witness, client: OpenAI) -> None:
    first, second = (
        client.completions.create(model="default", prompt=STORY, max_tokens=24, temperature=0, logprobs=1)
        for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    pairs = zip(
        first.choices[0].logprobs.token_logprobs, second.choices[0].logprobs.token_logprobs, strict=True
    )
    assert all(abs(a - b) <= 1e-3 for a, b in pairs)
    check_second(witness, cached(first.usage), cached(second.usage), second.usage.prompt_tokens)


@on("public")
def test_streaming_chat(witness: Witness, client: OpenAI) -> None:
    """A stream's pieces make the whole answer, and its usage reports the hit."""
    messages = [{"role": "user", "content": STORY}]
    whole = client.chat.completions.create(model="default", messages=messages, max_tokens=24, temperature=0)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model="default", messages=messages, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    check_second(witness, cached(whole.usage), cached(usage), usage.prompt_tokens)


@on("public")
def test_a_chat_of_several_turns(witness: Witness, client: OpenAI) -> None:
    """Each turn sends everything back; it reuses the whole history, answers included."""
    messages = [{"role": "user", "content": STORY}]
    length = 0
    for turn in range(4):
        answer = client.chat.completions.create(
            model="default", messages=messages, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        if turn and witness.config.hybrid:
            # The template closes an answer with a token of its own: only what both turns share counts.
            assert cached(answer.usage) >= witness.G * ((length - 1) // witness.G)
        length = answer.usage.prompt_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"Turn {turn}?"},
        ]


@on("public")
def test_frontend_program(witness: Witness) -> None:
    """SGLang's frontend language: one context forks three ways, each branch generates, one goes on."""
    import sglang as sgl

    @sgl.function
    def program(s, story: str):
        s += story
        s += sgl.gen("opening", max_tokens=18, ignore_eos=True)
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f"\nBranch {i}: "
            branch += sgl.gen("branch", max_tokens=20, ignore_eos=True)
        branches.join()
        s += "\nThe end: " + branches[1]["branch"]
        s += sgl.gen("ending", max_tokens=18, ignore_eos=True)

    endpoint = sgl.RuntimeEndpoint(witness.server.url)

    def run() -> tuple[str, ...]:
        state = program.run(story=STORY, temperature=0, backend=endpoint)
        return state["opening"], state["ending"], state.text()

    first = run()
    warm = run()
    witness.flush()
    again = run()
    assert first == warm == again
    assert all(first)
    if witness.config.hybrid:
        cached_pages = witness.pools()
        assert cached_pages is not None and cached_pages.checkpoints > len(STORY) // witness.G
