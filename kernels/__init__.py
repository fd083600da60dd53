"""Pure tensor functions: a torch reference and a fast version each.

Imports torch (and triton, numpy) only, nothing of the project.

Run its tests: `python -m pytest tests/kernels`
"""
