"""Generation with many adapters at once: requests join and leave at every token."""
