"""Benchmarks of `cupyllm bench` and scripts/bench_*.py: an op's work as cases, each timed beside its peers.

measure.py is the method, and knows no device; cases.py is what a benchmark is made of; linear.py is one; device.py runs
cases on a GPU; peers.py has who else can do the same work; report.py makes tables. A benchmark of another op is a
module with a function `cases(wanted)` and a line in OPS.
"""

from __future__ import annotations

# op -> the module of its benchmark
OPS = {"linear": "cupyllm.bench.linear", "quantized_linear": "cupyllm.bench.quantized_linear"}
