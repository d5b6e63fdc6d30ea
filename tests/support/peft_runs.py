"""The other side of joint = solo = PEFT: one job trained by transformers and PEFT, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

import peft
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from plait.core.jobs import JobSpec
from plait.core.samples import Split
from plait.engine.steps import DataOrder, learning_rate


class PeftRun:
    """One job on a plain base model, which becomes PEFT's.

    Args:
        targets: names of the layers, or "all-linear".

    Attributes:
        norms: of the gradients of each step, before they are clipped.
    """

    def __init__(self, base: PreTrainedModel, job: JobSpec, targets: Sequence[str] | str) -> None:
        base.set_attn_implementation("eager")  # sdpa leaves Gemma 2's softcap out
        config = peft.LoraConfig(
            r=job.adapter.rank,
            lora_alpha=job.adapter.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=job.adapter.rslora,
            fan_in_fan_out="GPT2" in type(base).__name__,
            task_type="CAUSAL_LM",
        )
        self.model = peft.get_peft_model(base, config)
        self.job = job
        self.norms: list[float] = []

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        named = dict(self.model.named_parameters())
        sites = [name.removesuffix(".lora_A.default.weight") for name in named if "lora_A" in name]
        kinds = ("lora_A", "lora_B")
        return {
            site.removeprefix("base_model.model."): tuple(
                named[f"{site}.{kind}.default.weight"].detach() for kind in kinds
            )
            for site in sites
        }

    def load(self, start: dict[str, tuple[Tensor, Tensor]]) -> None:
        assert self.weights().keys() == start.keys()
        for site, pair in self.weights().items():
            for mine, given in zip(pair, start[site], strict=True):
                mine.copy_(given)

    def train(self, split: Split) -> list[float]:
        """The loss of every step of the job's budget."""
        train = self.job.train
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        of_kind = [[p for name, p in named if kind in name] for kind in ("lora_A", "lora_B")]
        optimiser = torch.optim.AdamW(
            [{"params": of_kind[0]}, {"params": of_kind[1]}],
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        order = DataOrder.of(train, len(split))
        losses = []
        for step in range(1, order.steps + 1):
            losses.append(self.backward(split, order.at(step)[0]))
            rate = learning_rate(train, step, order.steps)
            optimiser.param_groups[0]["lr"] = rate
            optimiser.param_groups[1]["lr"] = rate * train.lora_plus_ratio
            most = float("inf") if train.clip_norm is None else train.clip_norm
            self.norms.append(torch.nn.utils.clip_grad_norm_([p for _, p in named], most).item())
            optimiser.step()
            optimiser.zero_grad()
        return losses

    def backward(self, split: Split, samples: tuple[int, ...]) -> float:
        """Gradients of the mean over the labelled tokens of the global batch; returns that mean."""
        labelled = sum(int(split[sample].labels.sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            tokens = torch.from_numpy(split[sample].tokens).long()
            chosen = torch.from_numpy(split[sample].labels)[1:]
            logits = self.model(tokens.unsqueeze(0), use_cache=False).logits[0]
            loss = cross_entropy(logits[:-1][chosen], tokens[1:][chosen], reduction="sum") / labelled
            loss.backward()
            total += loss.item()
        return total
