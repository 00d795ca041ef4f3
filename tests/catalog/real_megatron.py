"""What Bridge really builds on one rank of any layout, in one process: a fake process group, tiny real models.

:func:`answers` runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.families.checkpoints import know_configuration, write_kimi_k25_config

SIZES = ("tp", "pp", "ep", "etp", "cp", "vpp")


def answers(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from rlrefit.recipes.plan.offline_bridge import accept_any_attention, accept_delta_nets, accept_mamba
    from rlrefit.workers.trainers.megatron.cpu_standins import ensure_megatron

    auto_bridge = ensure_megatron()
    accept_any_attention()
    accept_mamba()
    accept_delta_nets()
    return [_one(auto_bridge, case) for case in cases]


def _one(auto_bridge: Any, case: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig

    dist.init_process_group("fake", rank=case["rank"], world_size=case["world"], store=FakeStore())
    folder = tempfile.TemporaryDirectory()
    try:
        if case["config"]["model_type"] == "kimi_k25":
            config, bridge = _with_own_code(
                auto_bridge, case["config"], list(case["exported"]), Path(folder.name)
            )
        else:
            config = AutoConfig.for_model(**case["config"])
            config.architectures = [case["architecture"]]
            bridge = auto_bridge.from_hf_config(config)
            if case["names"] is not None:
                bridge = _with_names(auto_bridge, config, case["names"])
        provider = _provider(bridge, case["layout"])
        provider.initialize_model_parallel(seed=0, create_gloo_process_groups=False)
        model = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, bf16=True
        )
        tasks = _own_tasks(bridge, model)
        exported = {name: tuple(shape) for name, shape in case["exported"].items()}
        vocabulary = config.get_text_config().vocab_size
        result = {"params": [_param(task, vocabulary, exported) for task in tasks]}
        if case["specs"]:
            result["specs"] = _specs(bridge, model)
        return result
    finally:
        folder.cleanup()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # Each model wants its own choice of attention kernels, and none may be left from the last one.
        for key in [key for key in os.environ if key.startswith("NVTE_")]:
            del os.environ[key]


def _with_own_code(auto_bridge: Any, keys: dict[str, Any], names: list[str], folder: Path) -> tuple[Any, Any]:
    """Configuration and bridge of a model whose encoder is made by the code beside its configuration."""
    from transformers import dynamic_module_utils

    from rlrefit.recipes.plan.offline_bridge import config_only_bridge

    write_kimi_k25_config(folder, keys)
    know_configuration(folder)
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / "modules")
    config, bridge = config_only_bridge(auto_bridge, str(folder))
    bridge.hf_pretrained.trust_remote_code = True
    # Bridge adds a list to it.
    bridge.hf_pretrained.state.get_all_keys = lambda: names
    return config, bridge


def _with_names(auto_bridge: Any, config: Any, names: list[str]) -> Any:
    """A bridge that finds ``names`` in the index of the checkpoint."""
    from rlrefit.recipes.plan.offline_bridge import config_only_bridge

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
        return config_only_bridge(auto_bridge, folder)[1]


def _provider(bridge: Any, layout: dict[str, Any]) -> Any:
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, set_for_cpu, set_layout, set_precision

    provider = bridge.to_megatron_provider(load_weights=False)
    tp, pp, ep, etp, cp, vpp = (layout.get(key, 1) for key in SIZES)
    set_layout(provider, MegatronLayout(tp, pp, vpp if vpp > 1 else None, ep, etp, cp))
    provider.should_pad_vocab = True
    provider.make_vocab_size_divisible_by = layout["vocabulary_multiple"]
    provider.num_layers_in_first_pipeline_stage = layout.get("first")
    provider.num_layers_in_last_pipeline_stage = layout.get("last")
    set_precision(provider, torch.bfloat16)
    provider.perform_initialization = False
    provider.moe_grouped_gemm = True
    set_for_cpu(provider)
    provider.finalize()
    return provider


def _own_tasks(bridge: Any, model: list[Any]) -> list[Any]:
    real = dist.all_gather_object
    # The fake group would hand out garbage; every rank's names are this rank's, and only its own tasks are read.
    dist.all_gather_object = lambda found, own, group=None: found.__setitem__(slice(None), [own] * len(found))
    try:
        tasks = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, model)
    finally:
        dist.all_gather_object = real
    return [task for task in tasks if task is not None and task.param_weight is not None]


def _param(task: Any, vocabulary: int, exported: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    from rlrefit.workers.trainers.megatron.rules import Refused, fragments_of_task

    weight = task.param_weight
    result: dict[str, Any] = {
        "name": task.global_param_name,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype),
    }
    mapping = task.mapping.hf_param
    try:
        fragments = fragments_of_task(task, exported)
    except Refused as reason:
        names = [mapping] if isinstance(mapping, str) else sorted(mapping.values())
        # Bridge makes some that it does not export (values that are keys).
        names = [name for name in names if name in exported]
        return result | {"refused": names, "reason": str(reason), "parts": []}
    is_vocabulary = task.global_param_name.endswith(("word_embeddings.weight", "output_layer.weight"))
    parts = []
    for fragment in fragments:
        (start, stop), *rest = fragment.box
        rows = vocabulary if is_vocabulary else fragment.full_shape[0]
        kept = min(stop, rows) - start
        if kept <= 0:
            continue
        view = fragment.view[:kept]
        strides = [step if n > 1 else 0 for step, n in zip(view.stride(), view.shape, strict=True)]
        place = [view.storage_offset() - weight.storage_offset(), strides, list(view.shape)]
        full = [rows, *fragment.full_shape[1:]]
        axes = fragment.axes and [[list(f) for f in fragment.axes.splits], list(fragment.axes.order)]
        parts.append([fragment.name, full, [[start, start + kept], *map(list, rest)], place, axes])
    return result | {"refused": [], "reason": "", "parts": parts}


def _specs(bridge: Any, model: list[Any]) -> list[Any]:
    from megatron.core import parallel_state

    from rlrefit.workers.trainers.megatron import enumeration

    bridge.get_conversion_tasks = lambda model: bridge._model_bridge.build_conversion_tasks(
        bridge.hf_pretrained, model
    )
    specs = enumeration.enumerate_export(
        bridge, model, parallel_state.get_pipeline_model_parallel_group()
    ).specs
    return [spec.to_json() for spec in specs]
