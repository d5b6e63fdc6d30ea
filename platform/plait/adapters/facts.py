"""What an adapter's folder says of itself: how its base model was quantised, and its model card.

A seam: read without torch, so that an export in PEFT's format does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from plait.core.errors import StorageError
from plait.models.tiny import tiny_named

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GGUF_FILE = "adapter.gguf"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes


def quantised_base(folder: Path) -> str | None:
    """How the base model was quantised that an adapter was trained on; None if its file does not say it.

    Raises:
        StorageError: there is no such file.
    """
    try:
        with safe_open(folder / WEIGHTS, "np") as file:
            said: str | None = (file.metadata() or {}).get("quantise")
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder / WEIGHTS}: {error}", f"An adapter's folder has {WEIGHTS}.") from error
    return said


def model_card(base: str, name: str, rank: int, facts: Mapping[str, object], *, form: str) -> str:
    """A model card: what was trained and how, and how to serve it."""
    library = "transformers" if form == "merged" else "peft"
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items())
    served = _served(base, name, rank, form)
    return (
        f"---\nbase_model: {base}\nlibrary_name: {library}\ntags: [lora]\n---\n\n# {name}\n\n"
        f"A LoRA adapter of rank {rank} for {base}, trained by Plait.\n\n"
        f"| setting or result | value |\n|---|---|\n{rows}\n\n## Serve it\n\n{served}\n"
    )


def _cell(value: object) -> str:
    """A value in a table of Markdown, such as a chat template."""
    return " ".join(str(value).replace("|", "\\|").splitlines())


def not_in_peft(base: str) -> str:
    """Why PEFT cannot load a base model by its name; "" if it may."""
    if tiny_named(base):
        return f"{base} is a small model with random weights, for trials: only Plait can make it."
    if base.endswith(".gguf"):
        return f"{base} is a GGUF file: PEFT cannot load it as a base model."
    return ""


def _served(base: str, name: str, rank: int, form: str) -> str:
    """How to serve it: the commands, or why there are none."""
    why = not_in_peft(base)
    if why and form == "peft":
        return (
            f"{why} For other programs export the whole model: --form merged.\n\n```\nplait serve FOLDER\n```"
        )
    if tiny_named(base) and form == "gguf":  # there is no such base in GGUF
        return why
    fitting = next((each for each in VLLM_RANKS if each >= rank), rank)
    sglang = "python -m sglang.launch_server --model-path"
    uses = {
        "peft": f"vllm serve {base} --enable-lora --max-lora-rank {fitting} --lora-modules {name}=FOLDER\n"
        f"{sglang} {base} --lora-paths {name}=FOLDER\nplait serve FOLDER",
        "merged": f"vllm serve FOLDER\n{sglang} FOLDER",
        "gguf": f"llama-server -m BASE.gguf --lora FOLDER/{GGUF_FILE}  # BASE.gguf: {base}",
    }
    return f"```\n{uses[form]}\n```"
