"""LoRA on the CPU platform: adapters are in the key of the cache, and reloading a name forgets."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.cold import equal_cold
from tests.support.configs import CONFIGS
from tests.support.park import ServerPark
from tests.support.reply import Reply
from tests.support.server import LiveServer
from tests.support.tokens import T

RANK = 4
PROMPT, NEW = T(1, 41), 6


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of the queries and values of every attention layer, in the format of peft."""
    config = json.loads((model / "config.json").read_text())
    chance = torch.Generator().manual_seed(seed)
    head = config["head_dim"]
    sizes = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, config["hidden_size"], generator=chance)
            weights[f"{stem}.lora_B.weight"] = torch.randn(size, RANK, generator=chance)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def ask(server: LiveServer, adapter: str | None) -> Reply:
    extra = {} if adapter is None else {"lora_path": adapter}
    return server.generate(PROMPT, NEW, top_logprobs_num=2, **extra)


def test_adapters_do_not_share_and_a_reloaded_name_forgets(park: ServerPark, tmp_path: Path) -> None:
    model = park.model_dir("tiny")
    one, two, three = (write_adapter(tmp_path / f"adapter-{seed}", model, seed) for seed in (1, 2, 3))
    flags = ("--enable-lora", "--lora-paths", f"one={one}", f"two={two}", "--max-loras-per-batch", "3")
    with park.serve(replace(CONFIGS["g8"], name="lora", flags=flags)) as server:
        cold = {}
        for name in (None, "one", "two"):
            server.flush()
            cold[name] = ask(server, name)
            assert cold[name].cached == 0
        assert len({reply.logprobs for reply in cold.values()}) == 3, "an adapter changed nothing"
        server.flush()
        for round_ in range(2):
            for name, expected in cold.items():
                reply = ask(server, name)
                assert reply.cached == 40 * round_, f"{name}: the first of its adapter finds nothing"
                equal_cold(reply, expected, f"adapter {name}, round {round_}")
        # All in one batch.
        for reply, name in zip(
            server.generate_batch([PROMPT] * 3, NEW, lora_path=[None, "one", "two"], top_logprobs_num=2),
            cold,
            strict=True,
        ):
            equal_cold(reply, cold[name], f"adapter {name}, in a batch")
        assert server.request("POST", "/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        loaded = server.request(
            "POST", "/load_lora_adapter", json={"lora_name": "one", "lora_path": str(three)}
        )
        assert loaded.status_code == 200, loaded.text
        reloaded = ask(server, "one")
        assert reloaded.cached == 0, "the new adapter of that name was served the old one's prefix"
        server.flush()
        equal_cold(reloaded, ask(server, "one"), "reloaded")
        assert reloaded.logprobs != cold["one"].logprobs
        missing = server.request("POST", "/generate", json={"input_ids": PROMPT, "lora_path": "none"})
        assert missing.status_code == 400 and "none" in missing.text, missing.text
        refused = server.request(
            "POST", "/load_lora_adapter", json={"lora_name": "x", "lora_path": "/no/such"}
        )
        assert refused.status_code == 400, refused.text
        equal_cold(ask(server, "two"), cold["two"], "after a refused load")
