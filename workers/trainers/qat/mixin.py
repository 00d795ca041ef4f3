"""``QATRefitMixin``: the refit of NVFP4 or INT4 weights, for a trainer that trains with them.

Inherit it before the mixin of your trainer; beside what that one needs, it needs ``self.qat``::

    class MyWorker(QATRefitMixin, FSDPRefitMixin, MyPPOWorker):
        refit_config = RefitConfig(bucket_mb=256, timeout_s=300)
        refit_dtype = torch.bfloat16

        def init_model(self):
            super().init_model()
            self.qat = quantize_module(self.model, QATConfig())

The calls are those of :class:`SourceRefitMixin`. The engine has to be started from a checkpoint of the same layers in
the same format, as :func:`.checkpoint.write_checkpoint` writes it. In INT4 ``refit_config`` has ``trainer_quantize_int4``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....integration.errors import RefitError
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import WeightSource
from ..source_mixin import SourceRefitMixin
from .model import QAT
from .source import PackedSource


class QATRefitMixin(SourceRefitMixin):
    """Sends packed weights and their scales in the quantized weights' place, those that training computed with.

    Attributes:
        qat: of the trainer's model.
    """

    qat: QAT

    def _make_refit_source(self) -> WeightSource:
        if self.qat.config.force_dynamic_quantization:
            raise RefitError(
                "self.qat trains with force_dynamic_quantization, so each call scales its inputs by their own maximum, and the "
                "engines of these refits (vLLM, SGLang) have no such mode: they would take input_scale, and cut off inputs that "
                "training did not. Nothing was sent. Train without it and calibrate, or generate with TensorRT-LLM "
                "(docs/trtllm.md) and its force_dynamic_quantization",
                stage="settings",
            )
        format = self.qat.config.format
        if format.has_global_scale:
            return PackedSource(super()._make_refit_source(), self.qat)
        if not getattr(self.refit_config, format.setting):
            raise RefitError(
                f"self.qat trains in {self.qat.config.format_name}, and refit_config does not have the trainer make it: the engine would get "
                f"weights that training did not compute with. Nothing was sent. Set {format.setting} to true",
                stage="settings",
            )
        self.qat.require_as_quantized()
        return super()._make_refit_source()

    def _trained_formats(self) -> Mapping[str, Format]:
        # A source of one's own need not tell.
        return super()._trained_formats() or self.qat.formats
