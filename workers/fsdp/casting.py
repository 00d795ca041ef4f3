"""Shards in the dtype of the export, where the optimizer keeps them in another."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...integration.layout import Fragment
from ...integration.packing import Cast


def exported(fragment: Fragment, dtype: torch.dtype) -> Fragment:
    """The fragment as it is exported: what is kept in another floating-point type is cast as it is packed."""
    return fragment if fragment.view.dtype == dtype else replace(fragment, encoding=Cast(dtype))
