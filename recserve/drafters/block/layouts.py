"""Configurations of block drafters in their published layouts.

    DFlash        dflash_config{target_layer_ids, mask_token_id, causal}; NeMo has the same
    JetSpec       dflash_config.causal_head
    DFlash2       dflash_config also has conv_*, selector_* and factors of embedding and logits
    DSpark        DeepSpec: all fields at the top; SpecForge: inside dflash_config
    speculators   speculators_model_type dflash, dflash2 or dspark; transformer_layer_config

Every field is read, known to change nothing, or an error.

Sources: z-lab/dflash, vLLM (qwen3_dflash.py, qwen3_dflash2.py), speculators (models/dflash, dflash2
and dspark), SpecForge and DeepSpec (modeling/dspark).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from recserve.drafters.block.heads import (
    ConvConfig,
    MarkovConfig,
    MarkovKind,
    SelectorConfig,
)
from recserve.drafters.block.network import BlockConfig
from recserve.drafters.shared.network_files import (
    SIZES,
    SLIDING,
    WITHOUT_EFFECT,
    check_names,
    check_neutral,
    lay_over,
    read_layer_types,
    read_model_type,
)
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    UnsupportedModel,
    read_config,
    read_flag,
    read_names,
    read_number,
    read_object,
    read_whole,
)

# Fields that this file reads, at the top, in `dflash_config` or in `transformer_layer_config`.
OWN = (
    *("dflash_config", "transformer_layer_config", "speculators_model_type", "architectures"),
    *("block_size", "dspark_block_size", "target_layer_ids", "dspark_target_layer_ids"),
    *("aux_hidden_state_layer_ids", "mask_token_id", "dspark_noise_token_id", "pard_token"),
    *("ptd_token_id", "draft_vocab_size", "target_hidden_size", "sample_from_anchor"),
    *("is_causal", "causal", "causal_head", "sliding_window_non_causal", "is_neox_style"),
    *("layer_types", "use_sliding_window", "sliding_window", "use_swa", "swa_window_size"),
    *("attention_sink_bias", "add_swa_attention_sink_bias", "projector_type", "attention_mode"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "shift_label"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "logit_scale"),
    *("markov_rank", "markov_head_type", "max_window_layers", "num_target_layers"),
    *("use_aux_hidden_state", "draft_num_hidden_layers"),
)
# Other fields without an effect. A draft's size follows the budget, not the confidence head.
OTHERS = (
    *("num_anchors", "max_anchors", "enable_confidence_head", "confidence_head_with_markov"),
    *("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma", "auf"),
    *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "use_confidence_head"),
    *("lambda_base_start", "lambda_base_decay_ratio"),
)
# Fields that are read in one place only.
TOP = (
    *("architectures", "layer_types", "use_sliding_window", "max_window_layers", "is_causal"),
    *("draft_num_hidden_layers", "speculators_model_type", "dflash_config"),
    "transformer_layer_config",
)
NESTED = ("causal", "causal_head")
KINDS = ("dflash", "dflash2", "dspark")
Kind = Literal["dflash", "dflash2", "dspark"]


@dataclass(frozen=True)
class _Fields:
    """The fields of a configuration, by where they lie.

    Attributes:
        top: Top level, with `transformer_layer_config` laid over it.
        nested: `dflash_config`.
        tensors: Names of the tensors, without prefixes.
        kind: What the configuration describes.
    """

    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    tensors: set[str]
    kind: Kind

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the value of a field; `names` are its names in several layouts.

        Raises:
            UnsupportedModel: If it has two values.
        """
        found = {
            f"{where}{name}": place[name]
            for where, place in (("dflash_config.", self.nested), ("", self.top))
            for name in names
            if place.get(name) is not None
        }
        if len(set(map(repr, found.values()))) > 1:
            raise UnsupportedModel(f"config.json contradicts itself: {found}; remove the wrong one")
        return next(iter(found.values()), default)

    def field(self, *names: str) -> tuple[str, dict[str, Any]]:
        """Returns the one of a field's names that the file uses, and the field alone; see `get`."""
        name = next((name for name in names if self.get(name) is not None), names[0])
        return name, {name: self.get(*names)}

    @property
    def speculators(self) -> bool:
        """Whether speculators wrote the file."""
        return self.top.get("speculators_model_type") is not None

    def flag(self, *names: str, default: bool = False) -> bool:
        """Returns true or false; see `get` and `read_flag`."""
        name, field = self.field(*names)
        return read_flag(field, name, default)


def read_block_config(
    fields: dict[str, Any], tensors: set[str], target: LanguageModel
) -> tuple[BlockConfig, bool]:
    """Reads a configuration.

    Args:
        fields: Content of config.json.
        tensors: Names of the tensors, without prefixes.
        target: The model to draft for.

    Returns:
        The configuration, and whether queries and keys are stored as pairs of neighbours instead of
        halves.

    Raises:
        UnsupportedModel: If a field is unknown, or what it asks for is not computed.
    """
    inner = read_object(fields, "transformer_layer_config")
    nested = read_object(fields, "dflash_config")
    known = {*SIZES, *OWN, *WITHOUT_EFFECT, *OTHERS}
    check_names(fields, known - {*NESTED})
    check_names(inner, known - {*NESTED, *TOP[-3:]}, "transformer_layer_config")
    check_names(nested, known - {*SIZES, *TOP}, "dflash_config")
    top = lay_over(fields, inner, "transformer_layer_config")
    given = {name: value for name, value in nested.items() if value is not None}
    names = read_names(fields, "architectures")
    found = _Fields(top, nested, tensors, _kind({**top, **given}, " ".join(names), tensors))
    _refuse(found)
    read_model_type(found.top)
    own, decoder = target.config, target.config.decoder
    sizes = dict(found.top) | {
        "model_type": "qwen3",
        "vocab_size": own.vocab_size,
        "max_position_embeddings": read_whole(
            found.top, "max_position_embeddings", decoder.max_positions
        ),
        "use_sliding_window": False,
    }
    ropes = [read_object(found.top, name) for name in ("rope_parameters", "rope_scaling")]
    if found.get("rope_theta") is None and all(rope.get("rope_theta") is None for rope in ropes):
        # transformers would read 10,000 and vLLM 1,000,000.
        raise UnsupportedModel("config.json names no rope_theta; add the one of the training")
    for name, expected in (
        ("vocab_size", own.vocab_size),
        ("num_target_layers", decoder.num_layers),
        ("target_hidden_size", decoder.hidden_size),
    ):
        if (stated := found.get(name, default=expected)) != expected:
            raise UnsupportedModel(f"{name} is {stated}; the target has {expected}")
    depth = found.top.get("num_hidden_layers")
    neutral = {"position_embedding_type": "rope", "qkv_bias": False}
    check_neutral(found.top, {"draft_num_hidden_layers": depth, **neutral})
    network = replace(
        read_config(sizes, decoder.max_positions).decoder,
        qk_norm=any(name.endswith("q_norm.weight") for name in tensors),
    )
    if not network.qk_norm and fields.get("model_type") == "qwen3":
        raise UnsupportedModel(
            "model_type is 'qwen3', which has norms of queries and keys; there is no tensor "
            "'layers.0.self_attn.q_norm.weight'"
        )
    masks = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    mask = found.get(*masks)
    if mask is None and "mask_embedding" not in tensors:
        raise UnsupportedModel("config.json names no mask_token_id, and there is no mask_embedding")
    size = found.get("block_size", "dspark_block_size")
    if size is None:
        raise UnsupportedModel("config.json names no block_size")
    config = BlockConfig(
        decoder=network,
        target_size=decoder.hidden_size,
        target_layers=_layers(found, decoder.num_layers),
        vocab_size=own.vocab_size,
        draft_vocab_size=_whole(found, "draft_vocab_size", default=own.vocab_size),
        block_size=_whole(found, "block_size", "dspark_block_size"),
        **_attention(found, network.num_layers, decoder.max_positions),
        mask_token=-1 if mask is None else _whole(found, *masks, least=0),
        from_anchor=_from_anchor(found),
        own_mask="mask_embedding" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        input_scale=_number(found, "input_embedding_scale", default=1.0),
        output_scale=_number(found, "output_multiplier", "logit_scale", default=1.0),
        softcap=_softcap(found),
        **_heads(found),
    )
    if config.from_anchor and found.kind == "dflash2":
        raise UnsupportedModel("sample_from_anchor is true; DFlash2 predicts from masks only")
    return config, not found.flag("is_neox_style", default=True)


def _whole(found: _Fields, *names: str, default: int | None = None, least: int = 1) -> int:
    name, field = found.field(*names)
    return read_whole(field, name, default, least)


def _number(found: _Fields, *names: str, default: float) -> float:
    name, field = found.field(*names)
    return read_number(field, name, default)


def _softcap(found: _Fields) -> float:
    """Returns the bound of the logits; 0 and null mean none."""
    name = "final_logit_softcapping"
    value = found.get(name)
    none = value is None or (type(value) in (int, float) and value == 0)
    return 0.0 if none else read_number({name: value}, name)


def _kind(every: Mapping[str, Any], names: str, tensors: set[str]) -> Kind:
    """Returns which drafter the configuration describes, if the tensors do not contradict it.

    Args:
        every: Fields of all places.
        names: Its architectures.
        tensors: Names of the tensors.
    """
    stated = every.get("speculators_model_type")
    if stated is not None and stated not in KINDS:
        raise UnsupportedModel(f"speculators_model_type is {stated!r}; choose one of {KINDS}")
    projector = every.get("projector_type")
    if projector not in (None, "dflash", "dspark"):
        raise UnsupportedModel(f"projector_type is {projector!r}; 'dflash' and 'dspark' are read")
    kind: Kind = "dflash"
    if stated == "dflash2" or "DFlash2" in names or every.get("selector_rank"):
        kind = "dflash2"
    elif (
        stated == "dspark" or "DSpark" in names or projector == "dspark" or every.get("markov_rank")
    ):
        kind = "dspark"
    parts = {name.split(".")[0] for name in tensors}
    convolved = any("_conv." in name for name in tensors)
    if kind != "dflash2" and ("candidate_selector" in parts or convolved):
        raise UnsupportedModel(
            "the file has DFlash2's convolutions or candidate_selector, and config.json describes "
            f"{kind!r}; without them it would draft badly, so add selector_rank, selector_top_k, "
            "conv_kernel_size and conv_group_size"
        )
    if not every.get("markov_rank") and "markov_head" in parts:
        raise UnsupportedModel("the file has a markov_head, and config.json names no markov_rank")
    return kind


def _refuse(found: _Fields) -> None:
    """Raises UnsupportedModel for what is known and not computed."""
    if any(name.startswith("hidden_dim_adapter") for name in found.tensors):
        raise UnsupportedModel(
            "the file has a hidden_dim_adapter: an untrained adapter for a target of another size"
        )
    if found.flag("attention_sink_bias", "add_swa_attention_sink_bias"):
        raise UnsupportedModel("attention_sink_bias is true; attention sinks are not computed")
    if (mode := found.get("attention_mode", default="gqa")) != "gqa":
        raise UnsupportedModel(f"attention_mode is {mode!r}; only 'gqa' is computed")
    if not found.flag("use_aux_hidden_state", default=True):
        raise UnsupportedModel("use_aux_hidden_state is false; a drafter without fc is not read")


def _from_anchor(found: _Fields) -> bool:
    """Returns whether the anchor's row predicts, which ModelOpt calls `shift_label`."""
    return found.flag("sample_from_anchor", "shift_label", default=found.kind == "dspark")


def _layers(found: _Fields, depth: int) -> tuple[int, ...]:
    """Returns the target's layers: n is the stream after n layers, as in `Drafter.hidden_layers`.

    The id i of DFlash, JetSpec, DFlash2 and DSpark is the output of layer i. The id i of
    speculators is hidden state i, which is the input of layer i.
    """
    speculators = found.speculators
    own, other = "aux_hidden_state_layer_ids", "dspark_target_layer_ids"
    if not speculators:
        own, other = other, own
    if found.get(other) is not None:
        raise UnsupportedModel(
            f"config.json has a field {other!r}, which is not read "
            f"{'with' if speculators else 'without'} speculators_model_type; use target_layer_ids"
        )
    ids = found.get("target_layer_ids", own)
    if ids is None or ids == []:
        raise UnsupportedModel("config.json names no layers of the target (target_layer_ids)")
    if not isinstance(ids, list) or not all(type(n) is int for n in ids):
        raise UnsupportedModel(
            f"config.json: target_layer_ids is {ids!r:.80}; a list of layers is needed"
        )
    layers = tuple(n + (not speculators) for n in ids)
    if bad := [given for n, given in zip(layers, ids, strict=True) if not 0 <= n <= depth]:
        raise UnsupportedModel(
            f"the drafter reads layer {bad[0]} of its target, which has {depth} layers"
        )
    return layers


def _attention(found: _Fields, num_layers: int, positions: int) -> dict[str, Any]:
    """Returns for each layer whether it is causal within the block, and its window.

    The order of the causal flags: `is_causal` at the top, `causal` (NeMo) or `causal_head`
    (JetSpec) inside `dflash_config`. Without any of them, layers with a sliding window are causal
    and others are not.
    """
    types = read_layer_types(found.top, num_layers)
    enabled = found.flag("use_sliding_window", default=types is not None)
    sliding = [kind == SLIDING for kind in types or ()]
    if any(sliding) and not enabled:
        raise UnsupportedModel(
            "config.json contradicts itself: layer_types names windows, and use_sliding_window is "
            "false; remove the wrong one"
        )
    if types is None:
        first = _whole(found, "max_window_layers", default=0, least=0)
        sliding = [enabled and number >= first for number in range(num_layers)]
    both_ways = found.flag("sliding_window_non_causal")
    if found.flag("use_swa") and not any(sliding):
        sliding, both_ways = [True] * num_layers, True
    window = found.get("swa_window_size", default=found.get("sliding_window"))
    if any(sliding) and window is None:
        raise UnsupportedModel(f"layer {sliding.index(True)} has a window; config.json names none")
    if any(sliding):
        window = read_whole({"sliding_window": window}, "sliding_window")
        window += found.speculators  # its anchor's row sees `window` positions before its own
    short = any(sliding) and window < positions
    windows = tuple(window if own else 0 for own in sliding) if short else ()
    flags = [read_flag(found.nested, n) for n in NESTED if found.nested.get(n) is not None]
    if len(set(flags)) > 1:
        raise UnsupportedModel("dflash_config: causal and causal_head contradict each other")
    causal = tuple(own and not both_ways for own in sliding)
    if flags:
        causal = (flags[0],) * num_layers
    if found.top.get("is_causal") is not None:
        causal = (read_flag(found.top, "is_causal"),) * num_layers
    return {"causal": causal, "windows": windows}


def _heads(found: _Fields) -> dict[str, Any]:
    """Returns the fields of BlockConfig that describe convolution, selector and Markov head."""
    if found.kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        values = {name: found.get(name) for name in names}
        if missing := [name for name, value in values.items() if value is None]:
            raise UnsupportedModel(f"config.json describes DFlash2 and names no {missing[0]}")
        if found.get("markov_rank"):
            raise UnsupportedModel("config.json describes DFlash2 and names a markov_rank")
        taps, group, rank, top = (_whole(found, name) for name in names)
        return {"conv": ConvConfig(taps, group), "selector": SelectorConfig(rank, top)}
    for name in ("conv_kernel_size", "conv_group_size", "selector_top_k"):
        if _whole(found, name, default=0, least=0):
            raise UnsupportedModel(
                f"config.json: {name} is {found.get(name)!r}, and it names no selector_rank; "
                "DFlash2 needs both"
            )
    _whole(found, "selector_rank", default=0, least=0)
    rank = _whole(found, "markov_rank", default=0, least=0)
    if not rank:
        return {}
    name = str(found.get("markov_head_type", default="vanilla")).lower()
    kinds = {kind: MarkovConfig(rank, kind) for kind in get_args(MarkovKind)}
    if name not in kinds:
        raise UnsupportedModel(f"markov_head_type is {name!r}; choose one of {list(kinds)}")
    return {"markov": kinds[name]}
