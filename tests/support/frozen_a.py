"""A variant of LoRA that is in no package: B alone trains."""

from __future__ import annotations

import frozen_a_kernel

from plait.adapters.lora import Lora


class FrozenA(frozen_a_kernel.FrozenA, Lora):
    """Initialised as plain LoRA. PEFT has no word for it: its folder is one of plain LoRA."""
