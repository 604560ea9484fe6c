"""SGLang's frontend language: a context is read once, three branches go on from it, one is chosen.

    make serve                     # in another terminal
    python examples/fork_join.py   # --url for another server
"""

import argparse

import sglang as sgl

CONTEXT = " ".join(f"Clue {number}: the window was open." for number in range(40))


@sgl.function
def detective(s, context: str):
    s += context
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"\nSuspect {number}: "
        branch += sgl.gen("theory", max_tokens=16, ignore_eos=True)
    branches.join()
    s += "\nThe best theory: " + branches[1]["theory"]
    s += sgl.gen("verdict", max_tokens=16, ignore_eos=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    endpoint = sgl.RuntimeEndpoint(options.parse_args().url)
    state = detective.run(context=CONTEXT, temperature=0, backend=endpoint)
    print("verdict:", repr(state["verdict"]))
    cached = state.get_meta_info("verdict")["cached_tokens"]
    print("prompt tokens of the verdict from the cache:", cached)


if __name__ == "__main__":
    main()
