"""The real SGLang server beside the project: a launcher for its own environment, and North's model for it."""
