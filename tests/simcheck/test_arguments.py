"""The grammar of a kernel's arguments, and how they meet its parameters."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import InputError, OutOfMemory
from cupyllm.sim.ptx import Parameter
from cupyllm.simcheck import arguments
from cupyllm.simcheck.arguments import Array, Given, Same, Scalar, arrays, assign, parse, scalar
from cupyllm.simcheck.declarations import Declared

POINTER = Parameter("k_param_0", "u64", 0, 8, 8)
KNOWN = [Declared("x", "float*", "pointer"), Declared("n", "int", "integer"), Declared("eps", "float", "float")]
PARAMETERS = [POINTER, Parameter("k_param_1", "u32", 8, 4, 4), Parameter("k_param_2", "f32", 12, 4, 4)]


def one(text: str) -> Given:
    (given,) = parse("", [text])
    return given


def contents(text: str) -> np.ndarray:
    given = assign([one(text)], [POINTER], None)
    found = arrays(given)["arg0"]
    assert found is not None
    return found


def number(text: str, ptx_type: str, nbytes: int, known: Declared | None = None) -> object:
    parameter = Parameter("k_param_0", ptx_type, 0, nbytes, nbytes)
    (given,) = assign([one(text)], [parameter], [known] if known else None)
    return scalar(given, parameter, known)


def test_a_line_is_split_into_arguments() -> None:
    given = parse("f32[64, 128] y=f32[8]:empty @y 64 1e-6", ["i=i64:-1", "null"])
    assert [item.value for item in given] == [
        Array("f32", (64, 128), "random"),
        Array("f32", (8,), "empty"),
        Same("y"),
        Scalar("64"),
        Scalar("1e-6"),
        Scalar("-1", "i64"),
        Scalar("null"),
    ]
    assert [item.name for item in given] == ["", "y", "", "", "", "i", ""]


def test_fills() -> None:
    assert np.array_equal(contents("i32[2,2]:arange"), [[0, 1], [2, 3]])
    assert np.array_equal(contents("u8[3]"), [0, 0, 0])
    assert np.array_equal(contents("bf16[2]:ones"), np.ones(2, ml_dtypes.bfloat16))
    assert np.array_equal(contents("i16[2]:-3"), [-3, -3]) and contents("i16[2]:-3").dtype == np.int16
    assert np.array_equal(contents("u64[1]:0xffffffffffffffff"), [2**64 - 1])
    assert np.isnan(contents("f64[2]:nan")).all()
    drawn = contents("i64[500]:random:7")
    assert set(np.unique(drawn)) == set(range(7))
    values = contents("f16[2000]")
    assert values.dtype == np.float16 and abs(float(values.mean())) < 0.1 and 0.9 < float(values.std()) < 1.1
    assert arrays([Given("", "x", Array("f32", (4,), "empty"))]) == {"x": None}
    assert contents("f32[0]:zeros").shape == (0,)


def test_arrays_from_files(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.save(tmp_path / "x.npy", values.T)
    assert np.array_equal(contents(str(tmp_path / "x.npy")), values.T)
    assert contents(f"i32[3,2]:{tmp_path}/x.npy").flags.c_contiguous
    np.save(tmp_path / "bits.npy", np.array([0x3F80, 0xC000], np.uint16))
    assert np.array_equal(contents(f"bf16[2]:{tmp_path}/bits.npy").astype(float), [1, -2])
    for text, said in [
        (f"f32[3,2]:{tmp_path}/x.npy", "holds int32 [3, 2], expected float32 [3, 2]"),
        (f"i32[2,3]:{tmp_path}/x.npy", "holds int32 [3, 2], expected int32 [2, 3]"),
        (f"{tmp_path}/none.npy", "none.npy does not exist"),
    ]:
        with pytest.raises(InputError, match="--args") as caught:
            contents(text)
        assert said in str(caught.value)
    (tmp_path / "text.npy").write_text("no numbers")
    np.save(tmp_path / "complex.npy", np.zeros(2, complex))
    for name, said in [("text", "is no .npy file"), ("complex", "holds complex128 values, expected one of i8,")]:
        with pytest.raises(InputError) as caught:
            contents(f"{tmp_path}/{name}.npy")
        assert said in str(caught.value)


def test_numbers_take_the_type_of_their_parameter() -> None:
    assert number("64", "u32", 4) == 64 and number("-1", "u32", 4) == -1 and number("0x10", "u64", 8) == 16
    assert number("4294967295", "u32", 4) == -1, "the bits of an unsigned one"
    assert number("18446744073709551615", "u64", 8) == -1
    assert number("true", "u8", 1) == 1
    small = number("1e-6", "f32", 4)
    assert isinstance(small, np.float32) and small == np.float32(1e-6)
    assert isinstance(number("3", "f64", 8), np.float64)
    assert isinstance(number("3", "b32", 4, Declared("x", "float", "float")), np.float32)
    assert number("3", "b32", 4) == 3 and isinstance(number("3.5", "b32", 4), np.float32)
    assert number("f16:1.5", "b8", 2) == 0x3E00 and number("1.5", "b8", 2, Declared("h", "half", "float")) == 0x3E00
    assert number("bf16:-2", "u16", 2) == 0xC000 - 2**16
    assert number("f32:1", "b32", 4) == np.float32(1)
    assert number("null", "u64", 8) == 0 and number("0", "u64", 8, KNOWN[0]) == 0


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "expected an array"),
        ("x=", "got 'x=', expected an array"),
        ("f31[4]", "the type is 'f31', expected one of i8, "),
        ("f32[]", "the shape is [], expected sizes"),
        ("f32[4,]", "the shape is [4,]"),
        ("f32[-1]", "the shape is [-1]"),
        ("f32[4]:emty", "the fill is 'emty', expected random,"),
        ("f32[4]:random:5", "the fill is 'random:5'"),
        ("f32[4", "got 'f32[4'"),
        ("i31:4", "the type is 'i31'"),
        ("i32:four", "got 'four'"),
        ("sixty", "got 'sixty'"),
    ],
)
def test_what_is_no_argument_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match="--args") as caught:
        one(text)
    assert said in str(caught.value)
    with pytest.raises(InputError, match="No closing quotation"):
        parse("'f32[4]")


def test_names_find_their_parameters() -> None:
    values = assign(parse("eps=1e-6 f32[4] 4"), PARAMETERS, KNOWN)
    assert [(item.name, item.text) for item in values] == [("x", "f32[4]"), ("n", "4"), ("eps", "eps=1e-6")]
    values = assign(parse("f32[4] count=4 1"), PARAMETERS, None)
    assert [item.name for item in values] == ["arg0", "count", "arg2"], "the source does not tell: order and own names"


@pytest.mark.parametrize(
    "line, said",
    [
        ("f32[4] 4", "got 2 arguments, the kernel takes 3: float* x, int n, float eps; give one for each"),
        ("f32[4] 4 1 1", "got 4 arguments, the kernel takes 3"),
        ("f32[4] m=4 1", "the kernel has no parameter 'm', expected one of x, n, eps"),
        ("n=4 n=4 1", "n was given twice"),
        ("4 4 1", "4: got the number 4, expected an array or null: the parameter is float* x"),
        ("f32[4] f32[4] 1", "got the array f32[4], expected an integer: the parameter is int n"),
        ("f32[4] 4 f32[4]", "expected a number: the parameter is float eps"),
        ("f32[4] 4.5 1", "4.5: got 4.5, expected an integer of 32 bits"),
        ("f32[4] 4294967296 1", "got 4294967296, expected an integer of 32 bits"),
        ("f32[4] i64:4 1", "got i64 of 8 bytes, expected an integer: the parameter is int n"),
        ("f32[4] null 1", "got null, expected an integer"),
        ("@z 4 1", "there is no array 'z', expected one of none"),
    ],
)
def test_what_does_not_fit_the_kernel_is_refused(line: str, said: str) -> None:
    with pytest.raises(InputError, match="--args") as caught:
        assign(parse(line), PARAMETERS, KNOWN)
    assert said in str(caught.value)


def test_without_declarations_the_message_shows_the_type() -> None:
    with pytest.raises(InputError, match=r"the parameter is parameter 1 \(\.u32\)"):
        assign(parse("f32[4] f32[4] 1"), PARAMETERS, None)
    by_value = Parameter("k_param_0", "b8", 0, 24, 8)
    with pytest.raises(InputError, match=r"parameter 0 \(24 bytes\), passed by value; only numbers can be"):
        assign(parse("4"), [by_value], None)
    with pytest.raises(InputError, match="a was given twice"):
        assign(parse("a=f32[4] a=4 1"), PARAMETERS, None)


def test_arrays_that_no_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemory):
        one("f32[1000000000,1000000000]")
    monkeypatch.setattr(arguments, "available_bytes", lambda: 47)
    with pytest.raises(OutOfMemory, match="the arrays take 48 bytes of host memory here, 47 are free"):
        arrays(assign([one("f32[4]")], [POINTER], None))
