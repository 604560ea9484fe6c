"""A family enters by the registry alone: ledger, planner and demo models know it at once."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hybrid import models
from sglang_hybrid.cli import demo_families, demo_model
from sglang_hybrid.cli.demo_families import FALCON_H1
from sglang_hybrid.cli.main import main
from sglang_hybrid.cli.plan import machine_of
from sglang_hybrid.models import readers
from sglang_hybrid.models.kinds import RecurrentKind


@pytest.fixture
def added() -> Iterator[models.Family]:
    """A family of Mamba2 layers that nobody has heard of."""
    family = models.Family(
        "osprey",
        ("osprey_h2",),
        readers.falcon_h1,
        ("OspreyH2ForCausalLM",),
        "sglang_hybrid.cli.demo_families:FALCON_H1",
    )
    models.add_family(family)
    yield family
    del models.FAMILIES["osprey"]


def test_a_new_family_is_one_row(
    added: models.Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FALCON_H1.config(FALCON_H1.shape) | {"model_type": "osprey_h2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.hybrid_shape(config, "osprey").kind == "mamba2"
    assert "OspreyH2ForCausalLM" in models.tested()
    assert "osprey" in demo_families.demo_names()
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path)
    machine, about = machine_of(str(tmp_path), memory="40GiB", parameters="1e9")
    assert about.served and machine.model.arenas == FALCON_H1.shape.layers
    demo_model.write_demo_model(tmp_path / "demo", family="osprey", vocab=512, context=512)
    assert (tmp_path / "demo" / "model.safetensors").is_file()


def test_nothing_is_entered_twice(added: models.Family) -> None:
    with pytest.raises(ValueError, match="family 'osprey' is already entered"):
        models.add_family(added)
    kind = models.KINDS["mamba2"]
    with pytest.raises(ValueError, match=r"'mamba2'.*already entered"):
        models.add_kind(kind)


def test_every_kind_names_what_it_needs() -> None:
    for kind in models.KINDS.values():
        assert isinstance(kind, RecurrentKind)
        for path in (kind.backend, kind.adapter):
            assert path.count(":") == 1
        assert set(kind.attention) <= {"MHA", "MLA"}
