"""Target modules mean what PEFT means by them."""

from __future__ import annotations

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from plait.core.errors import ModelError
from plait.models.targets import LinearInfo, resolve_targets

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in range(12)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
LINEARS = [LinearInfo(name, 64, 32 if "k_proj" in name else 128) for name in NAMES]


@pytest.mark.parametrize(
    "targets",
    [
        ("q_proj",),
        ("down_proj", "q_proj"),
        ("self_attn.q_proj",),
        ("1.self_attn.q_proj",),
        ("model.layers.3.mlp.up_proj", "k_proj"),
        r".*\.(q|k)_proj",
        r"model\.layers\.1\..*",
        ".*attn.*proj",
    ],
)
def test_targets_are_the_same_modules_as_in_peft(targets: str | tuple[str, ...]) -> None:
    config = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    expected = tuple(name for name in NAMES if check_target_module_exists(config, name))
    assert expected
    assert resolve_targets(targets, LINEARS) == expected


def test_all_linear_means_every_linear_layer() -> None:
    assert resolve_targets("all-linear", LINEARS) == tuple(NAMES)


@pytest.mark.parametrize("targets", [("c_attn",), ("q_proj", "proj"), "q_proj", ()])
def test_targets_that_match_nothing_are_refused_with_the_available_ones(
    targets: str | tuple[str, ...],
) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_targets(targets, LINEARS)
    assert "down_proj, k_proj, o_proj, q_proj, up_proj" in caught.value.remedy


def test_all_linear_in_a_list_is_refused_as_in_peft_with_the_way_to_write_it() -> None:
    with pytest.raises(ModelError, match="all-linear") as caught:
        resolve_targets(("all-linear",), LINEARS)
    assert "all-linear, which is not written in a list" in caught.value.remedy


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(ModelError, match="regular expression"):
        resolve_targets("(q_proj", LINEARS)


@pytest.mark.parametrize("targets", [r".*(q_proj|lm_head)", ("q_proj", "lm_head"), ".*", "lm_head"])
def test_targets_that_include_the_head_are_refused(targets: str | tuple[str, ...]) -> None:
    outside = ("model.embed_tokens", "lm_head")
    config = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    assert any(check_target_module_exists(config, name) for name in outside)
    with pytest.raises(ModelError, match=r"lm_head|embed_tokens") as caught:
        resolve_targets(targets, LINEARS, outside)
    assert "inside the decoder layers" in caught.value.rule
    assert "all-linear" in caught.value.remedy


def test_the_head_may_be_there_where_nothing_reaches_it() -> None:
    assert resolve_targets("all-linear", LINEARS, ("lm_head",)) == tuple(NAMES)
    assert resolve_targets(r".*\.q_proj", LINEARS, ("lm_head",)) == tuple(NAMES[::5])
