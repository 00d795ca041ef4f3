"""Families × layouts, each on four ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

WORLD = 4


@dataclass(frozen=True)
class Layout:
    """A layout of four ranks; what is left over is data parallelism.

    Attributes:
        tp, pp, ep, etp, cp: sizes.
        vpp: model chunks of each pipeline rank.
        first: layers of the first pipeline stage, if the stages are uneven.
        stages: Megatron's own text of a custom pipeline, e.g. ``Et|tttL``.
        ddp: wrapped in Megatron's DDP with the distributed optimizer's buffers.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    vpp: int = 1
    first: int | None = None
    stages: str | None = None
    ddp: bool = False

    def __str__(self) -> str:
        parts = [
            f"{f.name}{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(part.removesuffix("True").replace("|", ".") for part in parts)

    @property
    def groups(self) -> tuple[int, ...]:
        """What Megatron's process groups depend on."""
        return self.tp, self.pp, self.ep, self.etp, self.cp, self.vpp


@dataclass(frozen=True)
class Case:
    """One family in one layout."""

    family: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.family}-{self.layout}"

    @property
    def checkpoint(self) -> tuple[str, bool]:
        """The family, and whether fewer layers of it do: one of each kind, where no pipeline cuts them or into these."""
        return self.family, self.layout.pp == 1 or self.layout == _MTP_ALONE


_TP4 = Layout(tp=4)
_TP2_PP2 = Layout(tp=2, pp=2)
_UNEVEN = Layout(tp=2, pp=2, first=1)
_VPP = Layout(tp=2, pp=2, vpp=2)
_CUSTOM = Layout(tp=2, pp=2, vpp=2, stages="E|ttt|t|L")
_CP = Layout(tp=2, cp=2)
_CP_PP = Layout(pp=2, cp=2)
_DDP = Layout(tp=2, ddp=True)
_PP_DDP = Layout(pp=2, ddp=True)
_EP4 = Layout(tp=2, ep=4)
_ETP = Layout(tp=2, ep=2, etp=2)
_EP_PP = Layout(tp=2, pp=2, ep=2)
_EP_VPP = Layout(pp=2, ep=2, vpp=2)
_EP_UNEVEN_ETP = Layout(pp=2, etp=2, first=1)
_EP_CP_DDP = Layout(ep=2, cp=2, ddp=True)
_EP_TP_VPP = Layout(tp=2, pp=2, ep=2, vpp=2)
_ETP_VPP = Layout(pp=2, etp=2, vpp=2)
_ETP_DDP = Layout(tp=2, etp=2, ddp=True)
_EP_CUSTOM = Layout(pp=2, ep=2, vpp=2, stages="Et|t|tt|L")
# Multi-token prediction alone in a stage, which has an embedding of its own.
_MTP_ALONE = Layout(pp=4, stages="Et|t|m|L")
# Of families with which context parallelism has not been tried.
_EP_DDP = Layout(ep=2, ddp=True)
_EXPERTS = (_EP4, _ETP, _EP_PP, _EP_VPP, _EP_UNEVEN_ETP, _EP_CP_DDP)

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "qwen2": (_TP4, _UNEVEN, _VPP, _DDP),
    "qwen3": (_TP4, _UNEVEN, _CUSTOM, _CP, _DDP, _PP_DDP),
    "qwen3-tied": (_TP4, _TP2_PP2, _VPP, _DDP),
    "llama": (_TP4, _UNEVEN, _CP, _CP_PP, _DDP),
    "mistral": (_TP4, _UNEVEN, _VPP, _CP),
    "gemma2": (_TP4, _UNEVEN, _VPP, _DDP),
    "gemma3": (_TP4, _UNEVEN, _VPP, _DDP),
    # Bridge builds dense ones without pipeline stages alone.
    "gemma4": (_TP4, _DDP),
    "gemma4-shared": (_TP4, _DDP),
    "gemma4-moe": (_EP4, _ETP),
    "gemma4-vl": (_TP4, _DDP),
    "gemma4-shared-vl": (_TP4, _DDP),
    "gemma4-moe-vl": (_EP4, _ETP),
    "qwen3_moe": (*_EXPERTS, _EP_TP_VPP, _ETP_VPP, _ETP_DDP, _EP_CUSTOM),
    "deepseek_v3": (*_EXPERTS, _MTP_ALONE),
    "kimi_k2": (_EP4, _ETP, _EP_PP),
    "kimi_k25": _EXPERTS,
    "glm4_moe": (*_EXPERTS, _MTP_ALONE),
    "glm4_moe_lite": (*_EXPERTS[:-1], _EP_DDP, _MTP_ALONE),
    "glm_moe_dsa": (*_EXPERTS[:-1], _EP_DDP),
    "bailing_moe_v2": _EXPERTS,
    # Megatron has biases of experts at ETP 1 only.
    "gpt_oss": (_EP4, _EP_PP, _EP_VPP, _EP_CP_DDP),
    "minimax_m2": _EXPERTS,
    "nemotron_h": (_EP4, _ETP, _EP_PP, _TP4, _EP_CP_DDP),
    "nemotron_h-latent": (_EP4, _ETP, _EP_PP, _TP4, _EP_CP_DDP),
    "qwen3_next": _EXPERTS,
    "qwen3_5_moe": (_EP4, _ETP, _EP_PP, _EP_CP_DDP),
    "qwen3_5_moe-stacked": (_EP4, _ETP, _EP_PP, _EP_CP_DDP),
    "qwen3_5_moe-transposed": (_EP4, _ETP, _EP_PP, _EP_CP_DDP),
    "qwen3_5_text": (_TP4, _TP2_PP2, _CP, _DDP),
    # Bridge builds these without virtual stages alone, with as many layers in the first stage as the encoder feeds.
    "qwen3_vl": (_TP4, _TP2_PP2, _CP, _DDP),
    "qwen3_vl_moe": (_EP4, _ETP, _EP_PP, _EP_CP_DDP),
    "qwen3_5": (_TP4, _TP2_PP2, _CP, _DDP),
    "qwen3_5_moe-vl": (_EP4, _ETP, _EP_PP, _EP_CP_DDP),
    "qwen2_5_vl": (_TP4, _TP2_PP2, _CP, _DDP),
    # Bridge has no context parallelism for it.
    "gemma3-vl": (_TP4, _TP2_PP2, _DDP, _PP_DDP),
}
CASES = tuple(Case(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts)
# Each family, each of its mixtures in one layout that cuts experts, and each size and kind of a layout at least once.
_COVERING: dict[str, tuple[Layout, ...]] = {
    "qwen2": (_UNEVEN,),
    "qwen3": (_CUSTOM,),
    "qwen3-tied": (_TP2_PP2,),
    "llama": (_CP_PP,),
    "mistral": (_VPP,),
    "gemma2": (_DDP,),
    "gemma3": (_TP4,),
    "gemma4": (_TP4,),
    "gemma4-shared": (_DDP,),
    "gemma4-moe": (_ETP,),
    "gemma4-vl": (_DDP,),
    "gemma4-shared-vl": (_TP4,),
    "gemma4-moe-vl": (_EP4,),
    "qwen3_moe": (_EP_UNEVEN_ETP, _EP_CP_DDP),
    "deepseek_v3": (_ETP, _MTP_ALONE),
    "kimi_k2": (_ETP,),
    "kimi_k25": (_EP_PP,),
    "glm4_moe": (_ETP,),
    "glm4_moe_lite": (_ETP,),
    "glm_moe_dsa": (_ETP,),
    "bailing_moe_v2": (_ETP,),
    "gpt_oss": (_EP4,),
    "minimax_m2": (_ETP,),
    "nemotron_h": (_EP_PP,),
    "nemotron_h-latent": (_ETP,),
    "qwen3_next": (_ETP,),
    "qwen3_5_moe": (_ETP,),
    "qwen3_5_moe-stacked": (_EP4,),
    "qwen3_5_moe-transposed": (_ETP,),
    "qwen3_vl": (_TP2_PP2,),
    "qwen3_vl_moe": (_ETP,),
    "qwen3_5_text": (_TP4,),
    "qwen3_5": (_TP2_PP2,),
    "qwen3_5_moe-vl": (_ETP,),
    "qwen2_5_vl": (_TP4,),
    "gemma3-vl": (_TP2_PP2,),
}
# What each change runs; ``make test-all`` runs the rest too.
COVERING = tuple(Case(family, layout) for family, layouts in _COVERING.items() for layout in layouts)
REST = tuple(case for case in CASES if case not in COVERING)
# A checkpoint that has its tied embedding under both names.
COPIED = Case("qwen3-tied-twice", _TP2_PP2)
# More ranks than key heads.
FEW_GROUPS = Case("qwen3-few-groups", _TP4)
# Bridge changed, see :mod:`.variants`: what its rules no longer fit, on all ranks and, of the last norm, on one stage alone.
CHANGED = (Case("qwen3-exchanged", _TP4), Case("qwen3-shifted", _UNEVEN))
# Experts in INT4 in the checkpoint and on the way. Ranks of ETP cut their groups.
INT4 = tuple(Case("kimi_k25-int4", layout) for layout in (_EP4, _ETP))
# A rule that raises on one rank, see :mod:`.variants`.
BROKEN = Case("qwen3-broken", _TP2_PP2)
# Mapping classes by themselves, see :mod:`.mappings`.
CONVERSIONS = tuple(Case("mappings", Layout(tp=tp)) for tp in (2, 4))
