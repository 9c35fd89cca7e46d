"""How a model's pass runs: eagerly, compiled for the CPU, or captured for CUDA."""
