"""Why was more not reused? Sums of a trace that `--hybrid-trace trace.jsonl` wrote.

python examples/read_trace.py trace.jsonl
"""

import argparse
import json
from collections import Counter
from pathlib import Path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("trace", type=Path)
    records = [json.loads(line) for line in options.parse_args().trace.read_text().splitlines()]
    reusable = sum(record["r_max"] for record in records)
    reused = sum(record["cached_tokens"] for record in records)
    lost: Counter[str] = Counter()
    for record in records:
        if record["cause"]:
            lost[record["cause"]] += record["lost_tokens"]
    print(f"{len(records)} requests, {reusable} tokens could be reused, {reused} were")
    for cause, tokens in lost.most_common():
        print(f"{cause:20} {tokens:8} tokens lost")


if __name__ == "__main__":
    main()
