"""Everything between a name and a ready model: formats of checkpoints, quantization, devices, and what can go wrong."""
