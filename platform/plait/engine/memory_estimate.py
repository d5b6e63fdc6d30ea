"""An estimate of the activations' memory from the model's shape, until there is a fitted profile."""

from __future__ import annotations

from dataclasses import dataclass

SAVED_COPIES = 2.0  # what backward keeps and what passes through it, for each input and output of a linear
LOSS_COPIES = 3  # logits, their softmax and its gradient, in float32


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """What the memory of a base model and of its activations depends on.

    Attributes:
        layers: decoder layers.
        hidden: size of the residual stream.
        heads: attention heads.
        vocabulary: rows of the output head.
        linear_features: in + out of every linear of all layers, summed.
        weight_bytes: of the frozen weights.
        element_bytes: of one number of the arithmetic.
        logit_rows: labelled rows whose logits live at once (the chunk of the loss).
        keep_up_to: longest samples that keep their attention probabilities for backward.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    linear_features: int
    weight_bytes: int
    element_bytes: int
    logit_rows: int
    keep_up_to: int


def activation_bytes(model: ActivationShape, *, capacity: int, longest: int, checkpointing: bool) -> int:
    """Bytes that a full microbatch needs at its peak: an estimate.

    Args:
        model: its shape.
        capacity: tokens of the microbatch.
        longest: tokens of the longest sample: bounds Σℓ² of those that keep their attention probabilities.
        checkpointing: only the layers' inputs are kept, and one layer's insides.
    """
    tokens = capacity * model.element_bytes
    insides = SAVED_COPIES * (model.linear_features + 2 * model.layers * model.hidden) * tokens
    insides += SAVED_COPIES * model.layers * model.heads * min(longest, model.keep_up_to) * tokens
    if checkpointing:
        insides = insides / model.layers + model.layers * model.hidden * tokens
    loss = min(capacity, model.logit_rows) * model.vocabulary * 4 * LOSS_COPIES
    return int(insides) + loss
