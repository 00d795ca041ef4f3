"""What of SGLang the refit calls, as it was read in 0.5.17, and with sessions in 0.5.23: the doubles follow it.

``test_real_engine.py`` compares it with the SGLang that is there, field by field, where one can be imported.
"""

from __future__ import annotations

VERSION, VERSION_WITH_SESSIONS = "0.5.17", "0.5.23"

# sglang/srt/managers/io_struct.py: fields of the requests, all by keyword.
REQUESTS: dict[str, tuple[str, ...]] = {
    "UpdateWeightsFromTensorReqInput": (
        "serialized_named_tensors",
        "load_format",
        "flush_cache",
        "abort_all_requests",
        "weight_version",
        "disable_draft_model",
        "torch_empty_cache",
    ),
    "ReleaseMemoryOccupationReqInput": ("tags",),
    "ResumeMemoryOccupationReqInput": ("tags",),
    "PauseGenerationReqInput": ("mode",),
    "ContinueGenerationReqInput": ("torch_empty_cache",),
}

# sglang/srt/managers/tokenizer_control_mixin.py and tokenizer_manager.py: coroutines of TokenizerManager.
METHODS: dict[str, tuple[str, ...]] = {
    "update_weights_from_tensor": ("self", "obj", "request"),
    "release_memory_occupation": ("self", "obj", "request"),
    "resume_memory_occupation": ("self", "obj", "request"),
    "pause_generation": ("self", "obj"),
    "continue_generation": ("self", "obj"),
    "flush_cache": ("self", "timeout_s"),
}

# From 0.5.21 on, updates are refused outside of a session.
REQUESTS_WITH_SESSIONS = REQUESTS | {
    "UpdateWeightsFromTensorReqInput": (
        "serialized_named_tensors",
        "load_format",
        "flush_cache",
        "abort_all_requests",
        "weight_version",
        "selector",
        "torch_empty_cache",
    ),
    "BeginWeightUpdateReqInput": ("rid", "selector"),
    "EndWeightUpdateReqInput": ("rid",),
}
SESSION_METHODS: dict[str, tuple[str, ...]] = {
    "begin_weight_update": ("self", "obj", "request"),
    "end_weight_update": ("self", "obj", "request"),
}
SESSION_PATHS: dict[str, str] = {name: f"/{name}" for name in SESSION_METHODS}

# The same over HTTP: sglang/srt/entrypoints/http_server.py. 400 stands for success: false.
PATHS: dict[str, str] = {name: f"/{name}" for name in METHODS} | {
    "settings": "/server_info",
    "weight_version": "/model_info",
    "update_weight_version": "/update_weight_version",
}
