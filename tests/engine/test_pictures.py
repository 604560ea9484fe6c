"""Prompts with pictures: the key of a picture is its content, and a boundary inside one is as any other."""

import base64
import random
import struct
import zlib
from typing import Any

from tests.support.park import on
from tests.support.reply import Reply
from tests.support.server import LiveServer
from tests.support.server_config import ServerConfig
from tests.support.witness import Witness

PICTURED = (
    *(f"qwen3.5-vl-{name}" for name in ("s0", "s1", "s2", "d0")),
    *("qwen3.5-vl-moe-s1", "qwen3.5-vl-moe-d0"),
)
TOKENS = 6
LONG = "Look at this picture. "


def picture(seed: int, width: int = 256, height: int = 160) -> str:
    """A data URI of noise: one token for 32 x 32 pixels, so 40 tokens by default."""
    chance = random.Random(seed)
    rows = b"".join(b"\0" + chance.randbytes(3 * width) for _ in range(height))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


def chat(server: LiveServer, *parts: tuple[str, str]) -> Reply:
    """One user message of texts and pictures through /v1/chat/completions."""
    content = [
        {"type": "text", "text": value}
        if kind == "text"
        else {"type": "image_url", "image_url": {"url": value}}
        for kind, value in parts
    ]
    answer = server.post(
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
        },
    )
    said: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    usage = answer["usage"]
    return Reply(
        logprobs=tuple(one["logprob"] for one in said),
        cached=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        prompt_tokens=int(usage["prompt_tokens"]),
        text=repr([one["token"] for one in said]),
    )


def check(witness: Witness, *parts: tuple[str, str]) -> Reply:
    """The same message to the server and to the cold one: they say the same."""
    reply = chat(witness.server, *parts)
    cold = chat(witness.cold.server(witness.config.model), *parts)
    assert cold.cached == 0
    assert reply.text == cold.text
    assert reply.prompt_tokens == cold.prompt_tokens
    for i, (got, want) in enumerate(zip(reply.logprobs, cold.logprobs, strict=True)):
        assert abs(got - want) <= 1e-3, f"logprob of token {i} is {got}, cold {want}"
    return reply


def floor(config: ServerConfig, tokens: int) -> int:
    """The last boundary at or before so many tokens."""
    return tokens - tokens % config.grid


@on(*PICTURED)
def test_a_picture_is_shared_with_itself_alone(witness: Witness) -> None:
    """Same text, same or another picture, and a shared picture before another question."""
    before = len("user\n") + 1 + len(LONG) + 1  # ids before the picture's first
    inside, end = before + 20, before + 40
    assert floor(witness.config, before) < floor(witness.config, inside)
    first = check(witness, ("text", LONG), ("picture", picture(1)), ("text", "What is it?"))
    witness.hit_is(first, 0)
    assert first.prompt_tokens > end
    again = check(witness, ("text", LONG), ("picture", picture(1)), ("text", "What is it?"))
    witness.hit_is(again, floor(witness.config, first.prompt_tokens - 1))
    other = check(witness, ("text", LONG), ("picture", picture(2)), ("text", "What is it?"))
    witness.hit_is(other, floor(witness.config, before))
    shared = floor(witness.config, end + 1)
    question = check(witness, ("text", LONG), ("picture", picture(1)), ("text", "!"))
    witness.hit_is(question, shared)
    two = check(witness, ("text", LONG), ("picture", picture(1)), ("picture", picture(2)), ("text", "?"))
    witness.hit_is(two, shared)
    turned = check(witness, ("text", LONG), ("picture", picture(2)), ("picture", picture(1)), ("text", "?"))
    witness.hit_is(turned, shared)


@on(*PICTURED)
def test_a_boundary_inside_a_picture(witness: Witness) -> None:
    """The hit ends inside the picture: the tail of the picture is computed again, at its own positions."""
    text = "x" * 21
    before = len("user\n") + 1 + len(text) + 1
    first = check(witness, ("text", text), ("picture", picture(3)), ("text", "a"))
    witness.hit_is(first, 0)
    second = check(witness, ("text", text), ("picture", picture(3)), ("text", "b" * witness.G))
    assert before < floor(witness.config, before + 41) < before + 40
    witness.hit_is(second, floor(witness.config, before + 41))
