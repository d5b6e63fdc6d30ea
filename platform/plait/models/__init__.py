"""The frozen base model: loading it, running it as blocks, and the layers that adapters may target."""
