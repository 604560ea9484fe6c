"""An offline batch in a process of its own: `python offline_program.py MODEL REQUEST`, answers as JSON.

REQUEST is JSON: `engine` (keyword arguments of `sgl.Engine`) and `calls`, a list of keyword arguments of
`Engine.generate`. A refused call is answered by its sentence. Prints the list of answers and the server info
as the last line. SGLang spawns its children from here, so nothing may run on import.
"""

import json
import sys
from typing import Any


def answer(engine: Any, call: dict[str, Any]) -> Any:
    """What the engine answers; a refusal as its sentence."""
    try:
        return engine.generate(**call)
    except ValueError as refused:
        return {"refused": str(refused)}


def main(model: str, request: str) -> None:
    """Run all calls on one engine."""
    import sglang as sgl

    wanted = json.loads(request)
    engine = sgl.Engine(model_path=model, **wanted["engine"])
    try:
        answers = [answer(engine, call) for call in wanted["calls"]]
        state = engine.get_server_info()["internal_states"][0].get("hybrid")
    finally:
        engine.shutdown()
    print(json.dumps({"answers": answers, "hybrid": state}))


if __name__ == "__main__":
    main(*sys.argv[1:])
