"""What of SGLang 0.5.17 the refit calls, as it was read in the package ``sglang==0.5.17``: the doubles follow it.

``test_real_engine.py`` compares it with the SGLang that is there, field by field, where one can be imported.
"""

from __future__ import annotations

VERSION = "0.5.17"

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

# The same over HTTP: sglang/srt/entrypoints/http_server.py. 400 stands for success: false.
PATHS: dict[str, str] = {name: f"/{name}" for name in METHODS} | {
    "settings": "/server_info",
    "weight_version": "/model_info",
    "update_weight_version": "/update_weight_version",
}
