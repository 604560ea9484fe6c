"""A prefill whose preparation failed, where several ranks compute a batch together."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_hybrid.engine import holders, last_line
from sglang_hybrid.engine.last_line import PrefillFailed, prefill_prepared, preparing


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_is_taken_back_where_no_other_rank_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With one rank it goes back to the queue; with two the server ends, and nothing is taken back."""
    reqs = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    taken_back: list[Any] = []
    requests = SimpleNamespace(fresh=reqs, take_back=taken_back.append)
    cache = SimpleNamespace(req_to_token_pool=requests, failed={}, suspects=set())
    scheduler = SimpleNamespace(tree_cache=cache, chunked_req=None, waiting_queue=[])
    monkeypatch.setattr(last_line, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    monkeypatch.setattr(holders, "check", lambda cache: None)

    def fails(*_: Any) -> None:
        with preparing(reqs):
            raise RuntimeError("planted")

    if ranks == 1:
        assert prefill_prepared(fails, scheduler, None, "running") == (None, "running")
        assert scheduler.waiting_queue == taken_back == reqs and cache.suspects == {"a", "b"}
    else:
        with pytest.raises(PrefillFailed) as ended:
            prefill_prepared(fails, scheduler, None, "running")
        assert str(ended.value.__cause__) == "planted" and not taken_back
