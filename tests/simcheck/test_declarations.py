"""Kernels by their C++ names, and the parameters that a declaration shows."""

from __future__ import annotations

import pytest

from cupyllm.errors import InputError
from cupyllm.simcheck.declarations import Declared, cpp_name, declared, find_kernel


@pytest.mark.parametrize(
    "symbol, name",
    [
        ("scale", "scale"),
        ("_Z5scalePfi", "scale"),
        ("_ZN2ns1tIfEEvPT_", "ns::t"),
        ("_ZN2ns5inner5scaleEPf", "ns::inner::scale"),
        ("_Z1tIfEvPT_", "t"),
        ("_ZL4quadPf", "quad"),
        ("_Z", "_Z"),
    ],
)
def test_names_are_read_from_symbols(symbol: str, name: str) -> None:
    assert cpp_name(symbol) == name


def test_a_kernel_is_found_by_symbol_or_name() -> None:
    symbols = ["copy", "_ZN2ns5scaleEPf", "_ZN5other5scaleEPf"]
    assert find_kernel("copy", symbols, "f.cu") == "copy"
    assert find_kernel("ns::scale", symbols, "f.cu") == "_ZN2ns5scaleEPf"
    assert find_kernel("_ZN5other5scaleEPf", symbols, "f.cu") == "_ZN5other5scaleEPf"
    assert find_kernel("", ["_Z5scalePf"], "f.cu") == "_Z5scalePf"


@pytest.mark.parametrize(
    "wanted, symbols, said",
    [
        ("scale", ["_ZN2ns5scaleEPf", "_ZN5other5scaleEPf"], "fits 2 kernels: ns::scale (_ZN2ns5scaleEPf), other::"),
        ("scalf", ["copy", "_Z5scalePf"], "has no kernel 'scalf', expected one of copy, scale (_Z5scalePf)"),
        ("", ["copy", "move"], "has 2 kernels: copy, move; add :NAME"),
        ("copy", [], "defines no kernel"),
        ("x", [f"k{i}" for i in range(40)], "k11, ..."),
    ],
)
def test_what_is_there_is_listed(wanted: str, symbols: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        find_kernel(wanted, symbols, "f.cu")
    assert said in str(caught.value)


TEXT = """
// __global__ void scale(int not_this, int nor, int n, int d, int e, int f)
template <class T> __global__ void other(T* x);
__global__ void __launch_bounds__(128, (2)) scale(const float *__restrict__ x, float (&ref)[4],
    const unsigned long long n, /* in, out */ double factor, half h, size_t size, bf16 value, float y[], T const t = 3);
"""


def test_parameters_are_read_from_the_declaration() -> None:
    text = TEXT.replace("float (&ref)[4],", "")
    assert declared([text], "_Z5scalePKf", 8) == [
        Declared("x", "const float*", "pointer"),
        Declared("n", "const unsigned long long", "integer"),
        Declared("factor", "double", "float"),
        Declared("h", "half", "float"),
        Declared("size", "size_t", "integer"),
        Declared("value", "bf16", ""),
        Declared("y", "float []", "pointer"),
        Declared("t", "T const", ""),
    ]
    assert declared([text], "scale", 7) is None, "another count: not this one"
    assert declared([text], "other", 1) == [Declared("x", "T*", "pointer")]
    assert declared(["__global__ void none(void) {}"], "none", 0) == []
    assert declared(["__global__ void none() {}"], "none", 0) == []


@pytest.mark.parametrize(
    "text",
    [
        TEXT,  # a parameter that is not name behind type
        "KERNEL(scale)(float* x) {}",
        "__global__ void scale(float*) {}",
        "__global__ void scale(float* x",
        "__global__ void scale(float* x); __global__ void scale(int y);",
        "__global__ void scale(float* x, float* x);",
        "__global__ void f() { scale(x); }",
    ],
)
def test_what_cannot_be_read_has_no_names(text: str) -> None:
    assert declared([text], "scale", 1) is None and declared([text], "scale", 2) is None
