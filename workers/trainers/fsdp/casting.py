"""Shards in the dtype of the export, where the optimizer keeps them in another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....integration.layout import Fragment
from ....integration.packing import Cast


def exported(fragment: Fragment, dtype: torch.dtype) -> Fragment:
    """The fragment as it is exported: what is kept in another floating-point type is cast as it is packed."""
    return fragment if fragment.view.dtype == dtype else replace(fragment, encoding=Cast(dtype))


def kept_in_float32(model: Any, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Whether transformers keeps a tensor of this name in FP32 where the model is loaded in ``dtype``."""
    plan = getattr(model, "_get_dtype_plan", None)
    patterns = [re.compile(key.replace("*", ".*")) for key in plan(dtype)] if plan and dtype else []
    return lambda name: any(pattern.search(name) for pattern in patterns)
