"""Training: losses, optimizer, the compiled step, metrics, checkpoints, and the SFT loop with its stages."""
