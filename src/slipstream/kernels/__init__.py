"""Kernels of our own for CPUs, and weights in the layout that they multiply fastest."""
