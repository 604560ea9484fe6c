"""The seam table, its recorder and `sglang-hybrid check`, against the installed SGLang and doctored ones."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arguments import kept_process, parse

pytest.importorskip("sglang")

from sglang_hybrid.cli.main import main
from sglang_hybrid.engine import seam_record, seam_table, seams
from sglang_hybrid.engine.seam_facts import attributes_of, fingerprint
from sglang_hybrid.engine.seam_table import SEAMS, Seam
from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.platforms import gdn_ops
from sglang_hybrid.platforms.cpu_platform import HybridCpuPlatform


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_process():
        parse("--model-path", "none")  # loads plugins
        yield


def test_table_is_what_the_recorder_writes() -> None:
    """All rows, with the attributes that adapters read and the bodies they lean on; so every function that is
    hooked, overridden or replaced has a row, and none is kept that nobody asked for."""
    assert seams.is_tested()
    rows = [seam_record.recorded(seam) for seam in seam_record.wanted(SEAMS).values()]
    assert sorted(rows, key=lambda seam: seam.path) == sorted(SEAMS, key=lambda seam: seam.path)


def test_the_file_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = seam_table.FILE.read_text()
    monkeypatch.setattr(seam_table, "FILE", tmp_path / "seams.json")
    seam_table.write(seam_table.TESTED, list(reversed(SEAMS)))
    assert seam_table.FILE.read_text() == written
    assert seam_table.read() == (seam_table.TESTED, SEAMS)


def test_the_recorder_finds_what_an_adapter_leans_on() -> None:
    """Each kind of row is found anew when it is taken out."""
    found = {
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._init_pools",  # hooked
        "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.alloc",  # overridden
        "sglang.kernels.ops.attention.fla.kda:chunk_kda",  # replaced on the CPU platform
        "sglang.srt.managers.schedule_batch:Req",  # attributes that adapters read
    }
    rows = seam_record.wanted([seam for seam in SEAMS if seam.path not in found])
    assert {seam.path: seam for seam in map(seam_record.recorded, map(rows.__getitem__, found))} == {
        seam.path: seam for seam in SEAMS if seam.path in found
    }


def test_a_seam_that_is_gone_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    before = seam_table.FILE.read_text()
    assert seam_record.main(["sglang.srt.mem_cache.registry:no_such_name"]) == 1
    assert "gone: sglang.srt.mem_cache.registry:no_such_name" in capsys.readouterr().err
    assert seam_table.FILE.read_text() == before


@pytest.mark.parametrize(
    ("seam", "found"),
    [
        (
            Seam("sglang.srt.arg_groups.overrides:declare_resolution", "server_args fields"),
            "found (server_args source fields)",
        ),
        (Seam("sglang.srt.mem_cache.base_prefix_cache:EvictParams", "tokens"), "found (num_tokens"),
        (Seam("sglang.srt.arg_groups.overrides:declare"), "expected it to exist, found AttributeError"),
        (Seam("sglang.srt.no_such_module:name"), "expected it to exist, found ModuleNotFoundError"),
        (Seam("sglang.version:__version__", "self"), "found nothing callable"),
        (
            Seam("sglang.srt.managers.schedule_batch:Req", attributes="rid rows kv lines"),
            "expected the attributes rows lines, found none",
        ),
        (
            Seam("sglang.srt.mem_cache.common:release_kv_cache", body="0123456789abcdef"),
            "expected the body 0123456789abcdef, found ",
        ),
        (Seam("sglang.version:__version__", body="0123456789abcdef"), "expected a body to read"),
    ],
)
def test_a_changed_seam_is_named(seam: Seam, found: str) -> None:
    with pytest.raises(SeamError) as caught:
        seams.check_seams([seam])
    assert seam.path in str(caught.value)
    assert found in str(caught.value)


# -- facts ----------------------------------------------------------------------------------

BODY = '''
@decorated
def publish(self, up_to: int, *, last=None) -> None:
    """Say what."""
    # a comment
    self.lock(up_to)
    self.unlock(f"{last!r:>4}")
'''


def test_a_fingerprint_is_the_body_alone() -> None:
    """Not its words, its layout or its depth in a class; and the same on every Python that we run on."""
    same = [
        BODY.replace("# a comment", "# another"),
        BODY.replace('"""Say what."""', '"""Say\\n    more."""'),
        BODY.replace("self.lock(up_to)", "self.lock(\n        up_to,\n    )"),
        textwrap.indent(BODY, "    "),
    ]
    assert {fingerprint(text) for text in (BODY, *same)} == {"6cae3a7baa6b8fda"}
    first, second = "self.lock(up_to)", 'self.unlock(f"{last!r:>4}")'
    other = [
        BODY.replace(first, "x").replace(second, first).replace("    x\n", f"    {second}\n"),
        BODY.replace("last=None", "last=0"),
        BODY.replace("up_to: int", "up_to: str"),
        BODY.replace("@decorated", "@other"),
        BODY.replace("!r", "!s"),
        BODY.replace("self.lock(up_to)", "self.lock(-up_to)"),
    ]
    assert len({fingerprint(text) for text in (BODY, *other)}) == 1 + len(other)


def test_attributes_of_a_class_and_its_bases() -> None:
    class Base:
        __slots__ = ("slot",)

    class Record(Base):
        field: int

        def __init__(self) -> None:
            self.set, (self.first, *self.rest) = 1, (2, 3)
            sys.modules[__name__].elsewhere = 4  # type: ignore[attr-defined]

        @property
        def asked(self) -> int:
            return self.read

    found = attributes_of(Record)
    assert {"slot", "field", "set", "first", "rest", "asked"} <= found
    assert not {"elsewhere", "read"} & found


# -- another SGLang -------------------------------------------------------------------------


@pytest.fixture
def doctored(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An SGLang of another version; the test changes more of it."""
    monkeypatch.setattr("sglang.version.__version__", "0.5.99")
    return monkeypatch


def test_another_version_with_equal_seams_starts_with_a_warning(
    doctored: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seams.check_parent()
    assert "SGLang 0.5.99 is installed, tested: 0.5.23" in caplog.text


def test_a_tested_version_starts_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    seams.check_parent()
    assert "tested:" not in caplog.text


def changed_signature(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("sglang.srt.mem_cache.registry.register_radix_cache_backend", lambda name, make: None)
    path = "sglang.srt.mem_cache.registry:register_radix_cache_backend"
    return f"{path}: expected (name factory), found (name make)"


def changed_body(patch: pytest.MonkeyPatch) -> str:
    def release_kv_cache(req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        tree_cache.unlock(req.lock)

    patch.setattr("sglang.srt.mem_cache.common.release_kv_cache", release_kv_cache)
    return "sglang.srt.mem_cache.common:release_kv_cache: expected the body "


def missing_attribute(patch: pytest.MonkeyPatch) -> str:
    from sglang.srt.managers import schedule_batch

    patch.setattr(
        "sglang_hybrid.engine.seams.attributes_of",
        lambda kind: attributes_of(kind) - ({"to_finish"} if kind is schedule_batch.Req else set()),
    )
    return "sglang.srt.managers.schedule_batch:Req: expected the attributes to_finish, found none"


def missing_name(patch: pytest.MonkeyPatch) -> str:
    patch.delattr("sglang.srt.mem_cache.registry.TreeCacheBuildContext")
    return "sglang.srt.mem_cache.registry:TreeCacheBuildContext: expected it to exist, found AttributeError"


DOCTORS = (changed_signature, changed_body, missing_attribute, missing_name)


@pytest.mark.parametrize("doctor", DOCTORS)
def test_a_start_on_an_sglang_that_differs_ends_with_the_difference(
    doctor: Callable[[pytest.MonkeyPatch], str], doctored: pytest.MonkeyPatch
) -> None:
    difference = doctor(doctored)
    with pytest.raises(SeamError) as caught:
        seams.check_parent()
    assert str(caught.value).startswith(difference)
    assert "SGLang 0.5.99 is installed, tested: 0.5.23" in str(caught.value)


def test_the_command_says_it_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [f"same     {seam.path}" for seam in SEAMS]
    assert lines[-1] == f"SGLang 0.5.23 (a tested version): 0 of {len(SEAMS)} seams differ"
    difference = changed_body(monkeypatch)
    assert main(["check", "--quiet"]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith(f"differs  {difference}")
    assert last.endswith(f"1 of {len(SEAMS)} seams differ")


def test_a_worker_compares_what_the_cpu_platform_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the replacement: ours answer for what they replaced."""
    gdn_ops.install()
    gdn_ops.install()
    seams.check_replaced()
    monkeypatch.setattr("sglang.kernels.ops.attention.fla.kda.chunk_kda", lambda q, k: None)
    with pytest.raises(SeamError, match="chunk_kda: expected "):
        HybridCpuPlatform().init_backend()
