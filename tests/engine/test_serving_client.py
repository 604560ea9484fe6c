"""bench.serving's client is SGLang's own: what it reports is what the server did."""

from bench.serving_client import figures, rows, send
from bench.workloads import SharedContexts, r_max
from tests.support.configs import MODELS
from tests.support.park import on
from tests.support.witness import Witness

SMALL = SharedContexts(
    count=8, contexts=2, context_tokens=48, mean_input=60, mean_new=6, context_limit=256, most_new=16
)


@on("g8")
def test_tokens_of_a_run(witness: Witness) -> None:
    """One client, ample memory: every request finds what an endless cache would give it."""
    requests = SMALL.requests(1)
    made = rows(requests, 1, MODELS[witness.config.model]["vocab"])
    mark = witness.server.log_mark()
    found = figures(
        send(witness.server.url, made, ["--max-concurrency", "1"], 1), witness.server.log_since(mark)
    )
    assert found["reused_tokens"] == sum(r_max(requests, witness.G)) > 0
    assert found["prompt_tokens"] == sum(request.prompt for request in requests)
    assert found["recomputed_tokens"] == 0, "the log of prefill batches tells the same"
    assert found["output_tokens"] == sum(request.new for request in requests)
    assert found["output_tokens_per_s"] > 0 and found["mean_e2e_ms"] >= found["mean_ttft_ms"] > 0
