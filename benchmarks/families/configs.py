"""Configurations of transformers made small: the same family with fewer layers, narrower, with fewer words.

Nobody here knows what every family's fields mean, so it is tried in several ways, from the smallest on, and
the first with which the plain model trains is taken.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

WORDS = 512
_SPECIAL = WORDS - 64  # ids from here on are for special tokens

# What a field is called, and what it becomes; the first that matches.
_LAYERS = re.compile(
    r"^(n_|num_|e_|h_)?(hidden_|encoder_|decoder_|text_|vision_|transformer_|block_)*(layers?|depth|blocks)$"
    r"|^(encoder|decoder)_num_hidden_layers$|^num_(hidden|encoder|decoder)_(blocks|layers)$"
)
_DEPTHS = re.compile(
    r"^(depths?|layers|num_blocks|num_block_repeats|block_sizes|stage_num_blocks|num_layers)$"
)
_HEADS = re.compile(r"^(n|num|encoder|decoder|text|vision)?_?(num_)?(attention_)?heads?$")
_KEY_HEADS = re.compile(
    r"^(num_(key_value|kv|query)_(heads|groups)|num_kv_heads|n_kv_heads|multi_query_group_num)$"
)
_WIDTHS = re.compile(
    r"^((text_|vision_|encoder_|decoder_|out_|output_|projector_|embedding_|backbone_)?hidden_(size|dim)"
    r"|d_model|d_embed|n_embd|dim|emb_dim|embed_dim|embedding_(size|dim)|projection_dim|width|model_dim|lru_width"
    r"|attention_hidden_size|mm_hidden_size)$"
)
_INNER = re.compile(
    r"^((shared_expert_|moe_|expert_|encoder_|decoder_|shared_)*intermediate_(size|dim)|(encoder_|decoder_)?ffn_dim"
    r"|(encoder_|decoder_)?ffn_hidden_size|d_ff|d_inner|n_inner|mlp_dim|inner_dim|ffn_hidden_size)$"
)
_HEAD_WIDTHS = re.compile(
    r"^(head_dim|d_kv|d_head|dim_head|attention_head_dim|attention_head_size|head_size)$"
)
_NARROW: tuple[tuple[re.Pattern[str], int], ...] = (
    (_HEAD_WIDTHS, 16),
    (_WIDTHS, 64),
    (_INNER, 128),
    (re.compile(r"^(qk_rope_head_dim|qk_nope_head_dim|rotary_dim)$"), 8),
    (re.compile(r"^(v_head_dim|qk_head_dim|q_lora_rank|index_head_dim)$"), 16),
    (re.compile(r"^kv_lora_rank$"), 32),
    (_KEY_HEADS, 2),
    (_HEADS, 4),
)
_CHOSEN = re.compile(r"^(num_experts_per_(tok|token)|moe_topk|moe_k|top_k_experts)$")
_EVERYWHERE: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$|^moe_num_experts$"), 4),
    (_CHOSEN, 2),
    (re.compile(r"^(attn|expert)_layer_period$"), 2),  # of two layers the second has attention, or experts
    (re.compile(r"^(attn|expert)_layer_offset$"), 1),
    (re.compile(r"^(n_group|num_expert_group|topk_group|first_k_dense_replace|n_shared_experts)$"), 1),
)
_TOKEN = re.compile(r"_token_(id|index)$|^(image|video|audio)_token$")

Shrink = Callable[[str, Any], Any]


def ways(kind: Any, layers: int) -> Iterator[tuple[str, Any]]:
    """Small configurations of this class, each with what was made small about it.

    At last without a cache of keys and values, which some layers alone cannot make.
    """
    usual_ways = (("narrow", _narrow), ("an eighth", _eighth), ("shallow", _shallow))
    small = [(name, partial(shrink, layers)) for name, shrink in usual_ways]
    deeper = [(f"{name}, a layer more", partial(shrink, layers + 1)) for name, shrink in usual_ways[:2]]
    for name, shrink in (*small, *deeper):  # some cannot have a single layer
        try:
            yield name, _shrunk(kind(), shrink)
        except Exception:  # noqa: BLE001  a foreign class may object to its sizes in any way
            continue
    try:
        uncached = _shrunk(kind(), partial(_narrow, layers))
    except Exception:  # noqa: BLE001  as above
        return
    if hasattr(uncached, "use_cache"):
        uncached.use_cache = False
        yield "narrow, without a cache", uncached


def _shrunk(usual: Any, shrink: Shrink) -> Any:
    """A configuration of the same class with every field shrunk, those within it too."""
    fields = {name: getattr(usual, name) for name in _settable(usual) if hasattr(usual, name)}
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if getattr(value, "model_type", None) == "timm_backbone":
            changed[name] = _backbone(len(value.out_indices or [1]))
        elif hasattr(value, "model_type"):
            changed[name] = _shrunk(value, shrink)
        elif (small := shrink(name, value)) != value:
            changed[name] = small
    if getattr(usual, "out_features", None):  # of a backbone: what the model around it is handed
        changed["out_features"] = usual.out_features
    _cut_lists(fields, changed)
    if "head_dim" in changed and "rope_parameters" in fields:
        changed["rope_parameters"] = _sections(
            fields["rope_parameters"], fields["head_dim"], changed["head_dim"]
        )
    if getattr(usual, "is_encoder_decoder", False) and getattr(usual, "decoder_start_token_id", 0) is None:
        changed["decoder_start_token_id"] = 0
    if "default_language" in fields and fields["default_language"] is None:
        changed["default_language"] = fields["languages"][0]
    small = type(usual)(**changed)
    if getattr(small, "head_dim", 0) is None and getattr(small, "num_attention_heads", None):
        small.head_dim = small.hidden_size // small.num_attention_heads  # not every model works it out
    return small


def _backbone(maps: int) -> Any:
    """A small ResNet that hands on its last `maps` feature maps, in place of a backbone of timm's."""
    stages = [f"stage{stage}" for stage in range(5 - min(maps, 4), 5)]
    kind = import_module("transformers").ResNetConfig
    return kind(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1] * 4, out_features=stages)


def _cut_lists(fields: Mapping[str, Any], changed: dict[str, Any]) -> None:
    """What is said of each layer, for the layers that are left: one of every kind, as far as they go."""
    before = next((fields[name] for name in fields if _LAYERS.match(name) and name in changed), None)
    left = next((changed[name] for name in fields if _LAYERS.match(name) and name in changed), 0)
    for name, value in fields.items():
        if isinstance(value, list) and before is not None and len(value) == before > left:
            kinds = [value.index(kind) for kind in dict.fromkeys(value)] if value and _plain(value[0]) else []
            places = sorted({*kinds[:left], *range(left - len(kinds[:left]))})
            changed[name] = [value[place] for place in (*places, *range(left - len(places)))]
    if "attention_types" in fields:  # kinds of layers, and how often
        changed["attention_types"] = [[[kind], 1] for kind in fields["attention_types"][0][0]][:left]


def _plain(value: Any) -> bool:
    return isinstance(value, (str, int))


def _settable(usual: Any) -> list[str]:
    names = [each for each in inspect.signature(type(usual)).parameters if each not in ("args", "kwargs")]
    return [*names, *(name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name not in names)]


def _narrow(layers: int, name: str, value: Any) -> Any:
    if _counts(value):
        for pattern, small in _NARROW:
            if pattern.match(name):
                return min(value, small)
    return _shallow(layers, name, value)


def _eighth(layers: int, name: str, value: Any) -> Any:
    """Widths divided by eight, as they are to one another; as many heads as there were, or an eighth."""
    if _counts(value) and any(pattern.match(name) for pattern in (_WIDTHS, _INNER, _HEAD_WIDTHS)):
        return max(8, value // 8)
    if isinstance(value, list) and value and "hidden_sizes" in name:
        return [max(8, each // 8) for each in value]
    return _shallow(layers, name, value)


def _shallow(layers: int, name: str, value: Any) -> Any:
    """As wide as it was, with few layers and words."""
    if _TOKEN.search(name):
        return _token(name, value)
    if "vocab_size" in name and _counts(value) and not name.startswith("type"):
        return min(value, WORDS)
    if isinstance(value, list) and value and all(map(_counts, value)) and _DEPTHS.match(name):
        return [1 for _ in value]
    if name == "axial_pos_embds":  # places for texts of one length
        return False
    if value is None and (_CHOSEN.match(name) or name == "vocab_size"):
        return 2 if _CHOSEN.match(name) else WORDS
    if not _counts(value):
        return value
    if _LAYERS.match(name):
        return min(value, layers)
    if name == "image_size":
        return min(value, 224)
    for pattern, small in _EVERYWHERE:
        if pattern.match(name):
            return min(value, small)
    return value


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _token(name: str, value: Any) -> Any:
    """An id among the words that there still are, another for every name."""
    if isinstance(value, list):
        return [_token(f"{name}{place}", each) for place, each in enumerate(value)]
    if not isinstance(value, int) or value < _SPECIAL:
        return value
    return _SPECIAL + sum(map(ord, name)) % (WORDS - _SPECIAL)


def _sections(rope: Any, before: Any, after: int) -> Any:
    """The parts of a head that turn by time, height and width, for a narrower head."""
    if not isinstance(rope, Mapping) or "mrope_section" not in rope or not isinstance(before, int):
        return rope
    parts = [max(1, part * after // before) for part in rope["mrope_section"]]
    parts[0] += after // 2 - sum(parts)
    return {**rope, "mrope_section": parts}
