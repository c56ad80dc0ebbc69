"""Quantised graphs: weights of linears in int8, int4, fp8, MXFP8 or NVFP4, as ``DequantizeLinear``; no torch.

Reading order: :mod:`forms` (what a number becomes), :mod:`scales` (how a block's scale is chosen), :mod:`gptq` (what
rounding in turn makes of it), :mod:`linears` (which weights of a graph), :mod:`inputs` (what they meet), :mod:`targets`
(what a device can hold), :mod:`writer` (graph in, graph out).
"""
