"""An offline batch: 8 prompts behind one context on `sgl.Engine`, no server.

sglang-hybrid demo-model .demo-model        # or any model that is served
python examples/offline_batch.py .demo-model
"""

import argparse

import sglang as sgl

CONTEXT = " ".join(f"Line {number}: the river was high." for number in range(40))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("model", help="a directory")
    options.add_argument("--grid", type=int, default=512, help="tokens between two checkpoints")
    args = options.parse_args()
    engine = sgl.Engine(model_path=args.model, hybrid_mem="S1", hybrid_grid=args.grid, log_level="warning")
    try:
        sampling = {"temperature": 0, "max_new_tokens": 8}
        engine.generate(CONTEXT, sampling)  # the batch finds the context computed
        answers = engine.generate([f"{CONTEXT} Question {number}?" for number in range(8)], sampling)
    finally:
        engine.shutdown()
    for answer in answers:
        meta = answer["meta_info"]
        print(f"{meta['prompt_tokens']:5} prompt tokens, {meta['cached_tokens']:5} from the cache")


if __name__ == "__main__":
    main()
