"""Real starts that must end: by a refusal, or by a hook that is not in place.  Seconds each, never served."""

import shutil
import sys
from pathlib import Path

import pytest

from sglang_hybrid.cli.port import free_port
from tests.support.arguments import plant_plugin, python, write_config

pytest.importorskip("sglang")

pytestmark = pytest.mark.engine


LAUNCHERS = {
    "launch_server": ["-m", "sglang.launch_server", "--model-path"],
    "serve": [shutil.which("sglang", path=str(Path(sys.executable).parent)) or "sglang", "serve"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_ends_before_weights(launcher: str, model: str) -> None:
    ended = python(*LAUNCHERS[launcher], model, "--hybrid-mem", "S1", "--page-size", "64")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().splitlines()[-1].startswith("sglang_hybrid: error: --page-size 64 conflicts")
    assert "Traceback" not in ended.stderr
    assert "Load weight" not in ended.stderr + ended.stdout
    assert "Scheduler" not in ended.stderr + ended.stdout


def test_engine_raises_to_its_caller(model: str) -> None:
    script = f"""
import multiprocessing, sglang
try:
    sglang.Engine(model_path={model!r}, hybrid_mem="S1", hybrid_kernels="triton")
except ValueError as error:
    print("caught", error, multiprocessing.active_children())
"""
    ended = python("-c", script)
    assert "caught --hybrid-kernels triton is not served here: kernels 'triton' run on a CUDA" in ended.stdout
    assert "[]" in ended.stdout
    assert ended.returncode == 0


LAUNCH = ("-m", "sglang.launch_server", "--skip-tokenizer-init", "--hybrid-mem", "S1", "--model-path")

CHILD = """
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
stock = [ServerArgs]  # in a list: the registry replaces the name wherever a module holds it
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.runtime_context import publish
from sglang_hybrid.engine import args, hooks, seams
record = prepare_server_args(["--model-path", {model!r}, "--skip-tokenizer-init", "--hybrid-mem", "S1"])
record.resolve_once()
publish(record, role="scheduler")
seams.assert_applied()
assert hooks.published_on()
print("settings", *args.settings())
import sglang.srt.runtime_context as context
context.get_server_args = lambda: stock[0](model_path="x")
try:
    hooks.make_tree_cache(None)
except seams.SeamError as error:
    print("refused", error)
"""


def test_all_hooks_are_live_in_a_scheduler_process(tmp_path: Path) -> None:
    ended = python("-c", CHILD.format(model=write_config(tmp_path)))
    assert "settings S1 512 512 None auto" in ended.stdout, ended.stderr[-2000:]
    assert "refused server arguments: expected HybridServerArgs, found ServerArgs" in ended.stdout


PLANTED = {
    "changed signature": (
        """
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
KVCacheConfigurator._init_pools = lambda self, sizes: None
""",
        1,
        "sglang_hybrid: error: sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._init_pools: "
        "expected (self sizes req_to_token_pool token_to_kv_pool_allocator), found (self sizes)",
    ),
    "hook not applied": (
        """
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target
def refuse(target, hooks):
    if target.endswith("validate_mamba_no_buffer"):
        raise RuntimeError("planted")
    apply(target, hooks)
HookRegistry._apply_target = refuse
""",
        1,
        "sglang_hybrid: error: sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer: expected it to",
    ),
    "hook not registered": (
        """
from sglang.srt.plugins.hook_registry import HookRegistry
register = HookRegistry.register
def refuse(target, hook, kind):
    if target.endswith("validate_mamba_no_buffer"):
        raise RuntimeError("planted")
    register(target, hook, kind)
HookRegistry.register = refuse
""",
        2,
        "error: unrecognized arguments: --hybrid-mem S1",
    ),
}


def test_a_hook_missing_in_the_scheduler_ends_the_start(tmp_path: Path) -> None:
    """The fail-open hazard itself: in the child alone, SGLang logs the error and goes on without the hook."""
    from sglang_hybrid.cli.demo_model import write_demo_model

    body = """
import sys
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target
def refuse(target, hooks):
    if target.endswith("get_prefill_adder_class"):
        raise RuntimeError("planted")
    apply(target, hooks)
HookRegistry._apply_target = refuse
"""
    site = plant_plugin(tmp_path / "site", body)
    model = str(write_demo_model(tmp_path / "model", vocab=512, context=512))
    small = ("--hybrid-grid", "8", "--hybrid-budget-bytes", "8M", "--max-running-requests", "4")
    ended = python(*LAUNCH, model, *small, "--port", str(free_port()), path=site)
    assert ended.returncode != 0
    said = (
        "SeamError: sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class: expected it to lead to"
    )
    assert said in ended.stderr
    assert "fired up and ready" not in ended.stderr


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_ends_the_launcher(planted: str, tmp_path: Path) -> None:
    body, code, said = PLANTED[planted]
    site = plant_plugin(tmp_path / "site", body)
    ended = python(*LAUNCH, write_config(tmp_path / "model"), path=site)
    assert said in ended.stderr.rstrip().splitlines()[-1]
    assert ended.returncode == code
