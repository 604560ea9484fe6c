"""Two questions about one long document: the second reuses what the first computed.

    make serve                      # in another terminal
    python examples/chat_reuse.py   # --url for another server
"""

import argparse

from openai import OpenAI

DOCUMENT = " ".join(f"Entry {number}: the lamp was lit at dusk." for number in range(40))


def ask(client: OpenAI, question: str) -> tuple[str, int, int]:
    """(answer, prompt tokens, prompt tokens from the cache)."""
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}],
        max_tokens=16,
        temperature=0,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details  # the server runs with --enable-cache-report
    cached = details.cached_tokens if details else 0
    return reply.choices[0].message.content or "", reply.usage.prompt_tokens, cached or 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    client = OpenAI(base_url=options.parse_args().url + "/v1", api_key="none")
    for question in ("When was the lamp lit?", "Who lit it?"):
        _, prompt, cached = ask(client, question)
        print(f"{question:24} {prompt:5} prompt tokens, {cached:5} from the cache")


if __name__ == "__main__":
    main()
