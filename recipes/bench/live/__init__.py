"""``rlrefit bench --live``: refits from a live Megatron-core model into a live vLLM or SGLang, beside the engine's own
weight transfer.
"""
