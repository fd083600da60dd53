"""The network, its optimizer, its checkpoint format and its decoding. Imports kernels, never tasks or flows.

Run its tests: `python -m pytest tests/model`
"""
