"""Kernels that train many LoRA adapters over one frozen linear layer. They need torch; Triton is optional."""

from plait_kernels import grouped, reference, triton_backend  # noqa: F401  (each registers its backend)
from plait_kernels.backends import Backend, check_backend, register
from plait_kernels.bank import Bank, Layout, Site
from plait_kernels.dropout import RowCounters, dropout_mask
from plait_kernels.errors import KernelError
from plait_kernels.linear import multi_lora_linear
from plait_kernels.lora import LORA, Lora
from plait_kernels.loss import VocabularySlice, labelled_cross_entropy
from plait_kernels.optimiser import adamw_step, ask_steps
from plait_kernels.quantised import Quantised, dense, frozen_linear
from plait_kernels.routing import RoutedSegment, Routing
from plait_kernels.selection import Selection, choose_backend
from plait_kernels.steps import AdapterStep, AskedSteps, StepResult
from plait_kernels.variant import SiteRows, TensorSpec, Variant

__all__ = [
    "LORA",
    "AdapterStep",
    "AskedSteps",
    "Backend",
    "Bank",
    "KernelError",
    "Layout",
    "Lora",
    "Quantised",
    "RoutedSegment",
    "Routing",
    "RowCounters",
    "Selection",
    "Site",
    "SiteRows",
    "StepResult",
    "TensorSpec",
    "Variant",
    "VocabularySlice",
    "adamw_step",
    "ask_steps",
    "check_backend",
    "choose_backend",
    "dense",
    "dropout_mask",
    "frozen_linear",
    "labelled_cross_entropy",
    "multi_lora_linear",
    "register",
]
