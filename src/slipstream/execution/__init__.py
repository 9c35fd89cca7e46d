"""Running a model's passes: eagerly, compiled for the CPU, or captured for CUDA."""
