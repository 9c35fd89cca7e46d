"""The parts of ``recipes/demo_pair.py``: corpus, training, distillation, measurement."""
