"""Kernels that train many LoRA adapters over one frozen linear layer. They need torch; Triton is optional."""

from plait_kernels.backends import Selection, choose_backend
from plait_kernels.bank import Bank, Site
from plait_kernels.dropout import RowCounters, dropout_mask
from plait_kernels.errors import KernelError
from plait_kernels.linear import multi_lora_linear
from plait_kernels.loss import labelled_cross_entropy
from plait_kernels.optimiser import AdapterStep, StepResult, adamw_step
from plait_kernels.routing import RoutedSegment, Routing

__all__ = [
    "AdapterStep",
    "Bank",
    "KernelError",
    "RoutedSegment",
    "Routing",
    "RowCounters",
    "Selection",
    "Site",
    "StepResult",
    "adamw_step",
    "choose_backend",
    "dropout_mask",
    "labelled_cross_entropy",
    "multi_lora_linear",
]
