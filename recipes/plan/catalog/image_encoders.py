"""Image encoders beside a language model: all on the trainer's first pipeline stage, and on every stage of vLLM.

Qwen3's are Megatron's own layers, cut by TP as vLLM cuts them. Those of Qwen2.5-VL, Gemma 3 and Kimi-K2.5 are transformers' modules
inside of Megatron's model, whole on every rank, and vLLM cuts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .attention_units import QueryKeyValue
from .sections import CatalogError, Config, Section, norm
from .storage import Param, Part, Weight
from .units import ALONE, Division, Matrix, Mesh, Place, Shard, Stacked, Uncut, Unit, cut_box, everything


def qwen3_encoder(vision: Config) -> list[Section]:
    """Of Qwen3-VL and Qwen3.5: blocks, and mergers behind the last one and behind those of ``deepstack_visual_indexes``."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = _merged(vision)
    block = (
        *_layer_norm("norm1", "self_attention.linear_qkv.layer_norm_", hidden),
        *_attention(vision, "attn.", "qkv", "self_attention.linear_qkv."),
        *_linear("attn.proj", "self_attention.linear_proj", (hidden, hidden), 1),
        *_layer_norm("norm2", "mlp.linear_fc1.layer_norm_", hidden),
        *_linear("mlp.linear_fc1", "mlp.linear_fc1", (inner, hidden), 0),
        *_linear("mlp.linear_fc2", "mlp.linear_fc2", (hidden, inner), 1),
    )
    positions = (vision["num_position_embeddings"], hidden)
    pixels = _pixels(vision)
    around = (
        Matrix("patch_embed.proj.weight", "patch_embed.proj.weight", "patch_embed.proj.weight", pixels),
        Matrix("patch_embed.proj.bias", "patch_embed.proj.bias", "patch_embed.proj.bias", (hidden,)),
        Matrix("pos_embed.weight", "pos_embed.weight", "pos_embed.weight", positions),
    )

    def merger(width: int) -> tuple[Unit, ...]:
        """Normalizes vectors of ``width`` numbers: those of a patch, or of all that are merged."""
        return (
            *_layer_norm("norm", "patch_norm.", width),
            *_linear("linear_fc1", "linear_fc1", (merged, merged), 0),
            *_linear("linear_fc2", "linear_fc2", (vision["out_hidden_size"], merged), 1),
        )

    deep = merger(merged)
    return [
        _section("model.visual.", "vision_model.", "visual.", around),
        *(
            _section(
                f"model.visual.blocks.{i}.", f"vision_model.decoder.layers.{i}.", f"visual.blocks.{i}.", block
            )
            for i in range(vision["depth"])
        ),
        _section("model.visual.merger.", "vision_model.merger.", "visual.merger.", merger(hidden)),
        *(
            _section(
                f"model.visual.deepstack_merger_list.{i}.",
                f"vision_model.decoder.deepstack_merger_list.{i}.",
                f"visual.deepstack_merger_list.{i}.",
                deep,
            )
            for i in range(len(vision.get("deepstack_visual_indexes") or ()))
        ),
    ]


def qwen2_5_encoder(vision: Config) -> list[Section]:
    """Of Qwen2.5-VL: blocks with gated MLPs and without biases of norms."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = _merged(vision)
    block = (
        norm("norm1", "", hidden),
        *_attention(vision, "attn.", "qkv", ""),
        *_linear("attn.proj", "", (hidden, hidden), 1),
        norm("norm2", "", hidden),
        *(
            Stacked(
                (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"),
                ("",),
                f"mlp.gate_up_proj.{kind}",
                (inner, inner),
                columns,
            )
            for kind, columns in (("weight", hidden), ("bias", None))
        ),
        *_linear("mlp.down_proj", "", (hidden, inner), 1),
    )
    proj = "patch_embed.proj.weight"
    merger = (
        norm("ln_q", "", hidden),
        *_linear("mlp.0", "", (merged, merged), 0),
        *_linear("mlp.2", "", (vision["out_hidden_size"], merged), 1),
    )
    return [
        _section("visual.", "visual.", "visual.", _uncut([Matrix(proj, "", proj, _pixels(vision))])),
        *_alike("visual.blocks.", vision["depth"], _uncut(block)),
        _section("visual.merger.", "visual.merger.", "visual.merger.", _uncut(merger)),
    ]


def gemma3_encoder(vision: Config, hidden: int) -> list[Section]:
    """SigLIP and the projection to the language model's ``hidden`` size, of Gemma 3."""
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    block = (
        *_layer_norm("layer_norm1", "", width),
        *_attention(vision, "self_attn.", "", ""),
        *_linear("self_attn.out_proj", "", (width, width), 1),
        *_layer_norm("layer_norm2", "", width),
        *_linear("mlp.fc1", "", (inner, width), 0),
        *_linear("mlp.fc2", "", (width, inner), 1),
    )
    pixels = (width, vision.get("num_channels", 3), patch, patch)
    around = (
        *_linear("embeddings.patch_embedding", "", pixels, None),
        Matrix(
            "embeddings.position_embedding.weight",
            "",
            "embeddings.position_embedding.weight",
            ((vision["image_size"] // patch) ** 2, width),
        ),
        *_layer_norm("post_layernorm", "", width),
    )
    projector = (
        norm("mm_soft_emb_norm", "mm_soft_embed_norm.weight", width),
        _Turned("mm_input_projection_weight", "proj.weight", (width, hidden)),
    )
    # Megatron has transformers' encoder without the module around it.
    inside = "vision_tower.vision_model."
    return [
        _section(inside, "vision_tower.", inside, _uncut(around)),
        *(
            _section(
                f"{inside}encoder.layers.{i}.",
                f"vision_tower.encoder.layers.{i}.",
                f"{inside}encoder.layers.{i}.",
                units,
            )
            for units in (_uncut(block),)
            for i in range(vision["num_hidden_layers"])
        ),
        _section("multi_modal_projector.", "multi_modal_projector.", "multi_modal_projector.", projector),
    ]


def kimi_encoder(vision: Config, hidden: int) -> list[Section]:
    """MoonViT and the projection to the language model's ``hidden`` size, of Kimi-K2.5."""
    # Keys of the encoder may begin with "vt_", as the width that SGLang reads; vLLM reads them without.
    named = {key[3:]: value for key, value in vision.items() if key.startswith("vt_")}
    unlike = [key for key, value in named.items() if vision.get(key, value) != value]
    if unlike:
        raise CatalogError(
            f"vision_config has one {unlike[0]} ({vision[unlike[0]]}) and another vt_{unlike[0]} ({named[unlike[0]]}), of which engines read "
            "either; give both the same value"
        )
    own = {**vision, **named}
    width, inner, patch = own["hidden_size"], own["intermediate_size"], own["patch_size"]
    height, breadth = own["merge_kernel_size"]
    merged = width * height * breadth
    block = (
        *_layer_norm("norm0", "", width),
        *_layer_norm("norm1", "", width),
        *_linear("mlp.fc0", "", (inner, width), 0),
        *_linear("mlp.fc1", "", (width, inner), 1),
        *_attention(own, "", "wqkv", ""),
        *_linear("wo", "", (width, width), 1),
    )
    positions = "patch_embed.pos_emb.weight"
    places = (own["init_pos_emb_height"], own["init_pos_emb_width"], width)
    around = (
        *_linear("patch_embed.proj", "", (width, 3, patch, patch), None),
        Matrix(positions, "", positions, places),
        *_layer_norm("encoder.final_layernorm", "", width),
    )
    projector = (
        *_layer_norm("pre_norm", "", width),
        *_linear("proj.0", "", (merged, merged), None, vllm="linear_1"),
        *_linear("proj.2", "", (hidden, merged), None, vllm="linear_2"),
    )
    return [
        _section("vision_tower.", "vision_tower.", "vision_tower.", _uncut(around)),
        *_alike("vision_tower.encoder.blocks.", own["num_hidden_layers"], _uncut(block)),
        _section("mm_projector.", "mm_projector.", "mm_projector.", _uncut(projector)),
    ]


@dataclass(frozen=True)
class _Turned:
    """A matrix that Megatron has the other way round, cut by TP along its own first dimension, and vLLM as it is, whole."""

    hf: str
    megatron: str
    shape: tuple[int, int]

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.hf, self.shape)

    def train(self, place: Place) -> Iterator[Param]:
        yield self._param(self.megatron, place, place.tp, turned=True)

    def gen(self, place: Place) -> Iterator[Param]:
        yield self._param(self.hf, place, ALONE, turned=False)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"dimension 1 of {self.hf}", self.shape[1], "tp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return iter(())

    def _param(self, name: str, place: Place, shard: Shard, *, turned: bool) -> Param:
        box = cut_box(self.shape, 1, shard)
        rows, columns = (stop - start for start, stop in box)
        shape = (columns, rows) if turned else (rows, columns)
        return Param(
            name, shape, place.dtype, (Part(self.hf, self.shape, box, everything(shape), turned=turned),)
        )


def _merged(vision: Config) -> int:
    """Numbers of all patches that Qwen's encoders make one of. Where a configuration lacks a key, transformers' own counts."""
    return int(vision["hidden_size"] * vision.get("spatial_merge_size", 2) ** 2)


def _pixels(vision: Config) -> tuple[int, ...]:
    """Shape of the convolution that makes patches of frames."""
    patch = vision["patch_size"]
    frames = vision.get("temporal_patch_size", 2)
    return vision["hidden_size"], vision.get("in_channels", 3), frames, patch, patch


def _section(hf: str, megatron: str, vllm: str, units: tuple[Unit, ...]) -> Section:
    return Section(hf, megatron, vllm, units, "first", "every")


def _alike(prefix: str, count: int, units: tuple[Unit, ...]) -> Iterator[Section]:
    """Blocks that have one name everywhere."""
    for i in range(count):
        yield _section(f"{prefix}{i}.", f"{prefix}{i}.", f"{prefix}{i}.", units)


def _uncut(units: Iterable[Unit]) -> tuple[Unit, ...]:
    return tuple(map(Uncut, units))


def _layer_norm(hf: str, megatron: str, size: int) -> tuple[Matrix, Matrix]:
    """A norm's scale and bias; ``megatron`` is what stands before their kinds."""
    scale, bias = (
        Matrix(f"{hf}.{kind}", f"{megatron}{kind}", f"{hf}.{kind}", (size,)) for kind in ("weight", "bias")
    )
    return scale, bias


def _linear(
    hf: str, megatron: str, shape: tuple[int, ...], dim: int | None, vllm: str = ""
) -> tuple[Matrix, Matrix]:
    """A weight that TP cuts along ``dim``, and its bias, which it cuts with the rows alone; ``vllm``: if it is not ``hf`` there."""
    weight, bias = f"{hf}.weight", f"{hf}.bias"
    served = vllm or hf
    return (
        Matrix(weight, f"{megatron}.weight", f"{served}.weight", shape, dim),
        Matrix(bias, f"{megatron}.bias", f"{served}.bias", shape[:1], 0 if dim == 0 else None),
    )


def _attention(vision: Config, prefix: str, joined: str, megatron: str) -> Iterator[QueryKeyValue]:
    """Queries, keys and values of all heads, with biases."""
    heads = vision["num_heads" if "num_heads" in vision else "num_attention_heads"]
    hidden = vision["hidden_size"]
    for kind, columns in (("weight", hidden), ("bias", None)):
        yield QueryKeyValue(
            prefix,
            kind,
            f"{megatron}{kind}",
            f"{prefix}{joined or 'qkv_proj'}.{kind}",
            heads,
            heads,
            hidden // heads,
            columns,
            joined=joined,
        )
