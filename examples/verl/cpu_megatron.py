"""rlrefit's stand-ins for Transformer Engine, before verl imports Megatron: ``VERL_USE_EXTERNAL_MODULES`` names this module, on CPUs alone."""

from rlrefit.workers.trainers.megatron.cpu_standins import ensure_megatron

ensure_megatron()
