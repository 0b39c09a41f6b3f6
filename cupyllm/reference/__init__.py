"""The NumPy reference: the oracle that every kernel, graph and driver is judged against, and the CPU path.

One module an op, named as the op. Each holds the same pair, in plain NumPy:

    forward(*inputs, *params, **attrs) -> (out or tuple of outs, saved)
    backward(saved, *d_outs)           -> tuple of gradients aligned with (*inputs, *params); None where there is none

qwen3.py composes them into a layer and a model on one page; engine.py runs any checkpoint through it, one layer in
memory at a time. Everything works in the dtype of its inputs: float32 to run models, float64 to prove gradients.

Why nothing is shared with the device code: an oracle that imports what it judges repeats its mistakes. Only plain
data is common ground (config, errors, the engine's dataclasses, parameter names). An autodiff library as the oracle
was rejected for the same reason that the project has none: the derivation must be readable.
"""
