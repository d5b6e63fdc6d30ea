"""A variant of LoRA that is in no package: B alone trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import frozen_a_kernel

from plait.adapters.lora import Lora


class FrozenA(frozen_a_kernel.FrozenA, Lora):
    """Initialised as plain LoRA. PEFT has no word for it: its folder is one of plain LoRA."""

    def rejects(self, config: Mapping[str, Any], /) -> str:
        return f"peft_type={config['peft_type']!r}"
