"""Calibrated scales of an FP8 KV cache: measured on the trainer, carried by the misc path, set in the engine."""

from .amax import AmaxRecorder, Record
from .destination import KvScaleDestination, ScaledCache
from .names import AttentionLayer, Scales, layer_of_weight
from .source import KvScaleSource

__all__ = [
    "AmaxRecorder",
    "AttentionLayer",
    "KvScaleDestination",
    "KvScaleSource",
    "Record",
    "ScaledCache",
    "Scales",
    "layer_of_weight",
]
