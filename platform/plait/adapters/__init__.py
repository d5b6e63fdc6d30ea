"""Adapters beside the engine: their first weights, and PEFT folders in and out."""

from plait.adapters.initial import initial_a, initialise
from plait.adapters.peft_folder import (
    StoredAdapter,
    adapter_config,
    export_adapter,
    import_adapter,
    named_tensors,
    tensor_names,
)

__all__ = [
    "StoredAdapter",
    "adapter_config",
    "export_adapter",
    "import_adapter",
    "initial_a",
    "initialise",
    "named_tensors",
    "tensor_names",
]
