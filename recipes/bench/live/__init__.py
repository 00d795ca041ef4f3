"""``rlrefit bench-live``: refits from a live Megatron-core model into a live vLLM, beside vLLM's own weight transfer."""
