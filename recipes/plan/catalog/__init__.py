"""Well-known models, and what each rank of a trainer (Megatron-core, FSDP2) or an engine (vLLM) stores of them.

Pure arithmetic on configurations: no weights, no Megatron, no vLLM, no device.
"""

from .families import FAMILIES
from .layouts import FsdpLayout, GenLayout, LayoutError, TrainLayout, parse_gen, parse_train
from .model import Model, bundled_models, bundled_name, open_model
from .quantized import QuantizedFormat, option_of
from .sections import CatalogError
from .sides import (
    HoldingsOf,
    all_holdings,
    exported_specs,
    gen_holdings,
    gen_storage,
    padded_by_marlin,
    train_holdings,
    train_storage,
    violations,
)
from .storage import Param, Part, Weight

__all__ = [
    "FAMILIES",
    "CatalogError",
    "FsdpLayout",
    "GenLayout",
    "HoldingsOf",
    "LayoutError",
    "Model",
    "Param",
    "Part",
    "QuantizedFormat",
    "TrainLayout",
    "Weight",
    "all_holdings",
    "bundled_models",
    "bundled_name",
    "exported_specs",
    "gen_holdings",
    "gen_storage",
    "open_model",
    "option_of",
    "padded_by_marlin",
    "parse_gen",
    "parse_train",
    "train_holdings",
    "train_storage",
    "violations",
]
