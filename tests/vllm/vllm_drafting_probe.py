"""The tests' worker extension, for workers that draft on CPUs."""

from __future__ import annotations

from vllm_probe import ProbeExtension

from tests.vllm_cpu import give_heads_the_layers_states, keep_temperatures_of_drafts

# vLLM imports this before it makes the worker.
keep_temperatures_of_drafts()
give_heads_the_layers_states()


class DraftingProbe(ProbeExtension):
    """As its base."""
