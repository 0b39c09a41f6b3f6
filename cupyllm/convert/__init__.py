"""Other checkpoint formats, turned into Hugging Face directories."""
