"""`sglang-hybrid demo-model DIR`: write a small random hybrid model that any engine can serve.

For tests and for a first look without a download: config.json, safetensors, a byte-level tokenizer
with a chat template, generation_config.json.  Random weights, but such that a wrong recurrent
state changes what the model says (`demo_weights`, `demo_measure`).
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sglang_hybrid import models
from sglang_hybrid.cli.demo_families import demo_family, demo_names
from sglang_hybrid.cli.demo_shape import DemoShape

HELP = {
    "layers": "layers",
    "hidden": "width of the residual stream",
    "intermediate": "width of the MLP",
    "vocab": "token ids",
    "heads": "attention heads",
    "kv_heads": "KV heads",
    "head_dim": "attention head dim; a KV row is 2 x KV heads x this",
    "ssm_heads": "heads of the recurrent mixer",
    "ssm_head_dim": "head dim of the recurrent mixer; a state has heads x this rows",
    "ssm_state": "state size, the length of a state row",
    "ssm_groups": "groups of B and C",
    "conv_width": "taps of the convolution; the conv window holds one less",
    "context": "longest sequence, tokens",
    "attention_every": "every n-th layer is attention, the others recurrent; 0: every layer is both",
}

FALCON_7B_LAYER = DemoShape(
    layers=1, heads=4, kv_heads=2, head_dim=128, ssm_heads=24, ssm_head_dim=128, ssm_state=256
)
"""One layer with the state of a Falcon-H1-7B layer.  All in bf16, at a grid of 512: a KV row is 1 KiB, a page
512 KiB, the state three pages (24 heads of 64 KiB), the conv window 21 KiB.  In fp32 all of it doubles."""


def write_demo_model(
    directory: str | Path,
    *,
    family: str = "falcon-h1",
    seed: int = 0,
    dtype: str = "float32",
    logit_std: float = 10.0,
    shape: DemoShape | None = None,
    **sizes: int,
) -> Path:
    """Write the model into `directory` (made if missing, files of the same name replaced); return it.

    `family`: one of `demo_names()`.  `dtype` of the weights: "float32", "bfloat16" or "float16".
    `shape` (default: the family's), or single fields of `DemoShape` by name (`layers=4, vocab=512`),
    set the geometry.  Same arguments, same bytes.  Raises ValueError for a family, a dtype or a
    geometry that makes no model.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    from sglang_hybrid.cli.demo_tokenizer import FIRST_NAMED, MARKS, SPECIALS, build_tokenizer

    made = demo_family(family)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}, needs 'float32', 'bfloat16' or 'float16'")
    shape = replace(shape or made.shape, **sizes)
    specials = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": SPECIALS.index("<eos>")}
    config = made.config(shape)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    weights = pkgutil.resolve_name(made.weights)(shape, seed, FIRST_NAMED, logit_std)
    generation = transformers.GenerationConfig(do_sample=False, **specials)
    file, weights_file = path / "config.json", path / "model.safetensors"
    if made.model is None:
        cast = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
        save_file(cast, weights_file, metadata={"format": "pt"})
        generation.save_pretrained(path)
        architectures = models.FAMILIES[family].architectures[:1]
        named = {"architectures": architectures, "model_type": made.model_type, "dtype": dtype}
        file.write_text(json.dumps(named | specials))
    else:
        model_class = getattr(transformers, made.model)
        with torch.device("meta"):
            model = model_class(model_class.config_class(**config, **specials, dtype=dtype))
        # assign: the meta parameters take over these tensors; a missing or surplus name raises.
        model.load_state_dict(weights, assign=True, strict=True)
        model.to(getattr(torch, dtype))
        model.generation_config = generation
        model.save_pretrained(path)
    if made.on_disk:
        _rename_weights(weights_file, made.on_disk)
    # transformers leaves out what equals its own defaults, and SGLang's differ.
    file.write_text(json.dumps(json.loads(file.read_text()) | config, indent=2, sort_keys=True) + "\n")
    pictures = config.get("vision_config")
    build_tokenizer(shape.vocab, shape.context, MARKS if pictures else ()).save_pretrained(path)
    if pictures:
        write_processor(path, pictures)
    return path


def _rename_weights(file: Path, names: Sequence[tuple[str, str]]) -> None:
    """Replace parts of the weights' names in a safetensors file."""
    from safetensors.torch import load_file, save_file

    renamed = {}
    for name, weight in load_file(file).items():
        for old, new in names:
            name = name.replace(old, new)
        renamed[name] = weight
    save_file(renamed, file, metadata={"format": "pt"})


def write_processor(path: Path, vision: dict[str, Any]) -> None:
    """What cuts pictures and videos into patches for a model that takes them: small ones, as they are."""
    sizes = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    for file, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (path / file).write_text(json.dumps(sizes | kind, indent=2) + "\n")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "demo-model",
        help="write a small random hybrid model for tests and first steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write the checkpoint")
    parser.add_argument(
        "--family", choices=demo_names(), default="falcon-h1", help="kind of model (default: falcon-h1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed; same seed, same bytes (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--falcon-7b-layer",
        action="store_true",
        help="one layer with Falcon-H1-7B's state geometry, unless sizes are given",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="only write, do not measure the state's memory"
    )
    for field in fields(DemoShape):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int,
            default=None,
            help=f"{HELP[field.name]} (default: {_defaults(field.name)})",
        )


def _defaults(name: str) -> str:
    """A field's default, and those of the families that have another."""
    base = getattr(DemoShape(), name)
    others = [
        f"{key}: {value}" for key in demo_names() if (value := getattr(demo_family(key).shape, name)) != base
    ]
    return ", ".join([str(base), *others])


def run(args: argparse.Namespace) -> int:
    """Write the model, measure it, print what was written; exit status 2 for a geometry that makes none."""
    sizes = {field.name: getattr(args, field.name) for field in fields(DemoShape)}
    given = {name: value for name, value in sizes.items() if value is not None}
    base = FALCON_7B_LAYER if args.falcon_7b_layer else None
    try:
        path = write_demo_model(
            args.directory, family=args.family, seed=args.seed, dtype=args.dtype, shape=base, **given
        )
    except ValueError as error:
        print(f"sglang-hybrid demo-model: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}")
    if demo_family(args.family).model is None:
        print("not measured: transformers has no class of this family")
    elif not args.no_measure:
        from sglang_hybrid.cli.demo_measure import measure

        for line in measure(str(path)).lines():
            print(line)
    print(f"serve it: python -m sglang.launch_server --model-path {path} --dtype {args.dtype}")
    return 0
