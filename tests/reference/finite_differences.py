"""Central differences in float64 against a hand-written backward.

The scalar is f = sum of outputs times fixed random numbers, so that every output element matters by its own weight.
Step: the error of (f(x+h) - f(x-h)) / 2h is h^2/6 |f'''| + eps |f| / h, least near h = eps^(1/3) = 6e-6 and then about
eps^(2/3) = 4e-11 relative for values of order 1. LIMIT leaves room for large third derivatives and for sums f that
exceed their gradients, and is still far below any mistake in a formula.
Up to `max_elements` every element is checked, beyond that `num_directions` random directions. A wrong element is one in
n of every direction's sum, so even a few directions see it; whole layers, whose value is dearer, take fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

LIMIT = 1e-6
STEP = float(np.finfo(np.float64).eps) ** (1 / 3)


def relative_error(
    value: Callable[[], float],
    x: np.ndarray,
    gradient: np.ndarray,
    seed: int = 0,
    max_elements: int = 512,
    num_directions: int = 64,
) -> float:
    """Relative L2 distance between `gradient` and the differences of `value`, which reads x; x is restored."""
    assert x.dtype == np.float64 and gradient.shape == x.shape
    rng = np.random.default_rng(seed)
    if x.size <= max_elements:
        directions = np.eye(x.size).reshape(-1, *x.shape)
    else:
        directions = rng.standard_normal((num_directions, *x.shape))
        directions /= np.sqrt(np.sum(directions**2, axis=tuple(range(1, x.ndim + 1)), keepdims=True))
    origin = x.copy()
    step = STEP * max(1.0, float(np.abs(x).max(initial=0.0)))
    numeric, analytic = [], []
    for direction in directions:
        x[...] = origin + step * direction
        above = value()
        x[...] = origin - step * direction
        below = value()
        numeric.append((above - below) / (2 * step))
        analytic.append(np.sum(gradient * direction))
    x[...] = origin
    distance = np.linalg.norm(np.array(numeric) - np.array(analytic))
    size = np.linalg.norm(numeric)
    return float(distance / size) if size > 0 else float(distance)


def check_op(
    forward: Callable[..., tuple[object, object]],
    backward: Callable[..., tuple[np.ndarray | None, ...]],
    arguments: Sequence[np.ndarray | None],
    constants: Sequence[int] = (),
    seed: int = 0,
) -> dict[int, float]:
    """Check every float64 argument not named in `constants` (those must have no gradient). Returns the errors."""
    rng = np.random.default_rng(seed)

    def outputs() -> list[np.ndarray]:
        out = forward(*arguments)[0]
        return [a for a in (out if isinstance(out, tuple) else (out,)) if a.dtype == np.float64]

    factors = [rng.standard_normal(a.shape) for a in outputs()]
    gradients = backward(forward(*arguments)[1], *factors)
    errors = {}
    for index, argument in enumerate(arguments):
        if argument is None or argument.dtype != np.float64 or index in constants:
            assert index >= len(gradients) or gradients[index] is None
            continue
        gradient = gradients[index]
        assert gradient is not None and gradient.dtype == np.float64

        def value() -> float:
            return float(sum(np.sum(a * f) for a, f in zip(outputs(), factors, strict=True)))

        errors[index] = relative_error(value, argument, gradient, seed)
        print(f"argument {index} {argument.shape}: relative error {errors[index]:.1e}")
        assert errors[index] < LIMIT
    assert errors
    return errors
