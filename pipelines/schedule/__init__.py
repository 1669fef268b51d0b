"""Which steps and layers are dense, which step it is, and what models get by default. Knows no model, and imports no diffusers."""
