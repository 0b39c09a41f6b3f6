"""Micro-kernels of memory: loads and stores of every width, sign extension, packing moves, cp.async, atomics.

Where several threads update one address only results that do not depend on their order are kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from tests.sim.micro import CTYPE, Micro, dtype_of, identifier, kernel, values

Array = np.ndarray

BLOCK = 128
LETTER = {8: "r", 16: "h", 32: "r", 64: "l"}


def micros() -> Iterator[Micro]:
    yield from _loads()
    yield from _stores()
    yield from _moves()
    yield from _copies()
    yield from _atomics()
    yield from _contended()


# ---- loads and stores ----


def _loads() -> Iterator[Micro]:
    """a: bytes; thread i loads element i of the widest access that fits; d: the registers, sign- or zero-extended."""
    for space in ("global", "global.nc", "shared"):
        for type_, vec in [(t, 1) for t in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "f32", "f64", "b16")] + [
            (t, v) for t in ("u8", "s8", "u16", "b32", "f32") for v in (2, 4)
        ] + [("u64", 2), ("f64", 2)]:  # fmt: skip
            yield _load(space, type_, vec)
    yield _load("", "u32", 1)  # generic
    yield _load("volatile.global", "u32", 1)
    yield _load("local", "u32", 4)


def _width(type_: str) -> int:
    return 8 if type_[1:] == "8" else values.WIDTH[type_]


def _load(space: str, type_: str, vec: int) -> Micro:
    name = identifier(f"ld_{space or 'generic'}_v{vec}_{type_}")
    nbytes, width = _width(type_) // 8 * vec, values.WIDTH[type_]
    dtype = f"u{width // 8}"
    registers = ", ".join(f"%{k}" for k in range(vec))
    target = f"{{{registers}}}" if vec > 1 else registers
    vector = f".v{vec}" if vec > 1 else ""
    xs = [f"x{k}" for k in range(vec)]
    out = ", ".join(f'"={LETTER[width]}"({x})' for x in xs)
    prepare, address = _address(space, nbytes)
    dots = f".{space}" if space else ""
    if space == "volatile.global":
        dots = ".volatile.global"
    body = (
        f"{prepare}  {CTYPE[dtype]} {', '.join(xs)};\n"
        f'  asm volatile("ld{dots}{vector}.{type_} {target}, [%{vec}];" : {out} : {address} : "memory");\n'
    )
    body += "".join(f"  d[i * {vec} + {k}] = x{k};\n" for k in range(vec))
    return _micro(name, "load", kernel(name, ["u1"], [dtype], body), ((dtype, BLOCK * vec),), BLOCK * nbytes)


def _address(space: str, nbytes: int) -> tuple[str, str]:
    """(statements before, the asm's address operand) for element i of array a, which some spaces get a copy of."""
    if space == "shared":
        fill = (
            f"  __shared__ __align__(16) unsigned char s[{BLOCK * nbytes}];\n"
            f"  for (int k = 0; k < {nbytes}; ++k) s[k * {BLOCK} + i] = a[k * {BLOCK} + i];\n  __syncthreads();\n"
            f"  unsigned int p = (unsigned int)__cvta_generic_to_shared(s + i * {nbytes});\n"
        )
        return fill, '"r"(p)'
    if space == "local":
        fill = (
            f"  __align__(16) unsigned char s[{2 * nbytes}];\n"
            f"  for (int k = 0; k < {2 * nbytes}; ++k) s[k] = a[(i * {nbytes} + k) % {BLOCK * nbytes}];\n"
            "  unsigned long long p = (unsigned long long)__cvta_generic_to_local(s);\n"
        )
        return fill, '"l"(p)'
    return "", f'"l"(a + i * {nbytes})'


def _stores() -> Iterator[Micro]:
    """a: registers; d: the bytes that the stores leave. Only the low bits of a wider register count."""
    for space in ("global", "shared"):
        for type_, vec in (("u8", 1), ("b16", 1), ("b32", 1), ("b64", 1), ("u8", 4), ("u16", 2), ("u16", 4),
                           ("f32", 2), ("f32", 4), ("f64", 2), ("b32", 4)):  # fmt: skip
            yield _store(space, type_, vec)


def _store(space: str, type_: str, vec: int) -> Micro:
    name = identifier(f"st_{space}_v{vec}_{type_}")
    nbytes, width = _width(type_) // 8 * vec, values.WIDTH[type_]
    dtype = f"u{width // 8}"
    registers = ", ".join(f"%{k + 1}" for k in range(vec))
    source = f"{{{registers}}}" if vec > 1 else registers
    vector = f".v{vec}" if vec > 1 else ""
    ins = ", ".join(f'"{LETTER[width]}"(a[i * {vec} + {k}])' for k in range(vec))
    if space == "shared":
        before = f"  __shared__ __align__(16) unsigned char s[{BLOCK * nbytes}];\n"
        before += f"  unsigned int p = (unsigned int)__cvta_generic_to_shared(s + i * {nbytes});\n"
        after = f"  __syncthreads();\n  for (int k = 0; k < {nbytes}; ++k) d[k * {BLOCK} + i] = s[k * {BLOCK} + i];\n"
        address = '"r"(p)'
    else:
        before, after, address = "", "", f'"l"(d + i * {nbytes})'
    body = f'{before}  asm volatile("st.{space}{vector}.{type_} [%0], {source};" :: {address}, {ins} : "memory");\n'
    text = kernel(name, [dtype], ["u1"], body + after)
    return _micro(name, "store", text, (("u1", BLOCK * nbytes),), BLOCK * vec, dtype)


def _moves() -> Iterator[Micro]:
    """mov between a register and its parts; the first part is the low one. Other ways to reach memory."""
    parts = {"b32": ("b16", 2), "b64": ("b32", 2), "b64x4": ("b16", 4)}
    for whole, (part, count) in parts.items():
        wide = whole[:3]
        w, p = dtype_of(wide), dtype_of(part)
        names = [f"x{k}" for k in range(count)]
        lw, lp = LETTER[values.WIDTH[wide]], LETTER[values.WIDTH[part]]
        unpack = ", ".join(f"%{k}" for k in range(count))
        out = ", ".join(f'"={lp}"({x})' for x in names)
        body = f"  {CTYPE[p]} {', '.join(names)};\n"
        body += f'  asm volatile("mov.{wide} {{{unpack}}}, %{count};" : {out} : "{lw}"(a[i]));\n'
        body += "".join(f"  d[i * {count} + {k}] = x{k};\n" for k in range(count))
        name = f"mov_unpack_{whole}"
        yield _micro(name, "move", kernel(name, [w], [p], body), ((p, BLOCK * count),), BLOCK, w)
        pack = ", ".join(f"%{k + 1}" for k in range(count))
        ins = ", ".join(f'"{lp}"(a[i * {count} + {k}])' for k in range(count))
        body = f'  {CTYPE[w]} x;\n  asm volatile("mov.{wide} %0, {{{pack}}};" : "={lw}"(x) : {ins});\n  d[i] = x;\n'
        name = f"mov_pack_{whole}"
        yield _micro(name, "move", kernel(name, [p], [w], body), ((w, BLOCK),), BLOCK * count, p)
    body = (
        "  unsigned int x;\n"
        '  asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l};}" : "=r"(x) : "r"(a[i]));\n'
        "  d[i] = x;\n"
    )
    yield _micro("mov_swap", "move", kernel("mov_swap", ["u4"], ["u4"], body), (("u4", BLOCK),), BLOCK, "u4")
    body = (
        "  unsigned int s[8];\n  for (int k = 0; k < 8; ++k) s[k] = a[i] + k * 0x01010101u;\n"
        "  s[a[i] >> 3 & 7] ^= a[i];\n  d[i] = s[a[i] & 7];\n"
    )
    yield _micro("local_array", "move", kernel("local_array", ["u4"], ["u4"], body), (("u4", BLOCK),), BLOCK, "u4")
    body = (
        "  __shared__ unsigned int s[128];\n  s[threadIdx.x] = a[i] * 3;\n  __syncthreads();\n"
        "  const unsigned int* p = a[i] & 1 ? &s[threadIdx.x ^ 1] : &a[i ^ 1];\n"
        '  unsigned int x;\n  asm volatile("ld.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");\n  d[i] = x;\n'
    )
    name = "generic_either"
    yield _micro(name, "move", kernel(name, ["u4"], ["u4"], body), (("u4", BLOCK),), BLOCK, "u4")
    body = (
        "  unsigned int x = 0, y;\n  __shared__ unsigned int s[1];\n"
        '  asm volatile("{.reg .pred p; isspacep.shared p, %1; selp.b32 %0, 1, 0, p;}" : "=r"(y) : "l"(s)); x |= y;\n'
        '  asm volatile("{.reg .pred p; isspacep.global p, %1; selp.b32 %0, 2, 0, p;}" : "=r"(y) : "l"(s)); x |= y;\n'
        '  asm volatile("{.reg .pred p; isspacep.global p, %1; selp.b32 %0, 4, 0, p;}" : "=r"(y) : "l"(a)); x |= y;\n'
        '  asm volatile("{.reg .pred p; isspacep.shared p, %1; selp.b32 %0, 8, 0, p;}" : "=r"(y) : "l"(a)); x |= y;\n'
        "  d[i] = x;\n"
    )
    yield _micro("isspacep", "move", kernel("isspacep", ["u4"], ["u4"], body), (("u4", BLOCK),), BLOCK, "u4")


# ---- cp.async ----


def _copies() -> Iterator[Micro]:
    """a: bytes; b: source size a thread (0 .. nbytes); d: the 16-byte slots, 0x5A where nothing is copied."""
    for cache, nbytes in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for sized in (False, True):
            name = f"cp_async_{cache}_{nbytes}" + ("_sized" if sized else "")
            size = ", %2" if sized else ""
            body = (
                "  __shared__ __align__(16) unsigned char s[128 * 16];\n"
                "  for (int k = 0; k < 16; ++k) s[i * 16 + k] = 0x5A;\n"
                "  unsigned int p = (unsigned int)__cvta_generic_to_shared(s + i * 16);\n"
                f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {nbytes}{size};"\n'
                '    :: "r"(p), "l"(a + i * 16), "r"(b[i]) : "memory");\n'
                '  asm volatile("cp.async.commit_group;" ::: "memory");\n'
                '  asm volatile("cp.async.wait_group 0;" ::: "memory");\n  __syncthreads();\n'
                "  for (int k = 0; k < 16; ++k) d[i * 16 + k] = s[i * 16 + k];\n"
            )
            yield Micro(
                name=name,
                family="cp.async",
                source=kernel(name, ["u1", "u4"], ["u1"], body),
                draw=partial(_copy_operands, nbytes, zlib.crc32(name.encode())),
                outputs=(("u1", BLOCK * 16),),
                grid=1,
                block=BLOCK,
            )


def _copy_operands(nbytes: int, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    sizes = np.arange(BLOCK) % (nbytes + 1)
    return rng.integers(0, 256, BLOCK * 16, dtype=np.uint8), sizes.astype(np.uint32)


# ---- atomics ----


def _atomics() -> Iterator[Micro]:
    """Thread i: old = d[i]; d[i] = op(old, b[i]), on a copy of a; e: what the instruction returns."""
    for space in ("global", "shared"):
        for op, types in (
            ("add", ("u32", "s32", "u64", "f32", "f64", "f16x2")),
            ("min", ("u32", "s32", "u64", "s64")),
            ("max", ("u32", "s32", "u64", "s64")),
            ("and", ("b32", "b64")),
            ("or", ("b32", "b64")),
            ("xor", ("b32", "b64")),
            ("exch", ("b32", "b64")),
            ("inc", ("u32",)),
            ("dec", ("u32",)),
            ("cas", ("b16", "b32", "b64")),
        ):
            for type_ in types:
                yield _atomic(space, op, type_)


def _atomic(space: str, op: str, type_: str) -> Micro:
    """cas compares with c[i], which is the old value in half of the threads."""
    name = f"atom_{space}_{op}_{type_}"
    dtype = dtype_of(type_)
    letter = LETTER[values.WIDTH[type_]]
    noftz = ".noftz" if "16x2" in type_ else ""
    operands, ins = ("%2, %3", f'"{letter}"(c[i]), "{letter}"(b[i])') if op == "cas" else ("%2", f'"{letter}"(b[i])')
    text = f"atom.{space}.{op}{noftz}.{type_} %0, [%1], {operands};"
    if space == "shared":
        before = f"  __shared__ {CTYPE[dtype]} s[{BLOCK}];\n  s[threadIdx.x] = a[i];\n"
        before += "  unsigned int p = (unsigned int)__cvta_generic_to_shared(s + threadIdx.x);\n"
        address, after = '"r"(p)', "  d[i] = s[threadIdx.x];\n"
    else:
        before, address, after = "  d[i] = a[i];\n", '"l"(d + i)', ""
    body = f'{before}  {CTYPE[dtype]} x;\n  asm volatile("{text}" : "={letter}"(x) : {address}, {ins} : "memory");\n'
    body += f"{after}  e[i] = x;\n"
    n = 128
    return Micro(
        name=name,
        family="atomic",
        source=kernel(name, [dtype] * (3 if op == "cas" else 2), [dtype] * 2, body),
        draw=partial(_atomic_operands, op, type_, n, zlib.crc32(type_.encode())),
        outputs=((dtype, n), (dtype, n)),
        grid=n // BLOCK,
        block=BLOCK,
    )


def _atomic_operands(op: str, type_: str, n: int, seed: int) -> tuple[Array, ...]:
    old, new = values.operands((type_, type_), n, seed)
    if op != "cas":
        return old, new
    compare = np.where(np.arange(n) % 2 == 0, old, new)
    return old, np.roll(new, 1), compare


def _contended() -> Iterator[Micro]:
    """128 threads update 4 counters that start at a; integer results do not depend on the order."""
    for op, type_ in (("add", "u32"), ("add", "u64"), ("min", "s32"), ("max", "u32"), ("or", "b32"), ("xor", "b64"),
                      ("inc", "u32")):  # fmt: skip
        for red in (False, True):
            if red and op == "inc":
                continue
            name = f"{'red' if red else 'atom'}_contended_{op}_{type_}"
            dtype = dtype_of(type_)
            letter = LETTER[values.WIDTH[type_]]
            if red:
                asm = f'asm volatile("red.shared.{op}.{type_} [%0], %1;" :: "r"(p), "{letter}"(b[i]) : "memory");'
            else:
                asm = (
                    f'{CTYPE[dtype]} x; asm volatile("atom.shared.{op}.{type_} %0, [%1], %2;" : "={letter}"(x) : '
                    f'"r"(p), "{letter}"(b[i]) : "memory");'
                )
            body = (
                f"  __shared__ {CTYPE[dtype]} s[4];\n  if (i < 4) s[i] = a[i];\n  __syncthreads();\n"
                f"  unsigned int p = (unsigned int)__cvta_generic_to_shared(s + i % 4);\n  {asm}\n"
                "  __syncthreads();\n  if (i < 4) d[i] = s[i];\n"
            )
            yield Micro(
                name=name,
                family="atomic",
                source=kernel(name, [dtype] * 2, [dtype], body),
                draw=partial(_contended_operands, type_, op, zlib.crc32(name.encode())),
                outputs=((dtype, 4),),
                grid=1,
                block=BLOCK,
            )


def _contended_operands(type_: str, op: str, seed: int) -> tuple[Array, Array]:
    """inc wraps at its operand, which therefore has to be the same for all threads of a counter."""
    rng = np.random.default_rng(seed)
    start, new = values.draw(type_, 4, rng), values.draw(type_, BLOCK, rng)
    if op == "inc":
        start %= 8
        new[:] = 5
    return start, new


def _micro(
    name: str, family: str, text: str, outputs: tuple[tuple[str, int], ...], count: int, dtype: str = "u1"
) -> Micro:
    """One block; the input is `count` elements."""
    return Micro(
        name=name,
        family=family,
        source=text,
        draw=partial(_bytes, count, dtype),
        outputs=outputs,
        grid=1,
        block=BLOCK,
    )


def _bytes(count: int, dtype: str) -> tuple[Array]:
    """Bytes whose neighbours all differ, and every 256th too; random ones would fill the golden file."""
    k = np.arange(count * np.dtype(dtype).itemsize)
    return (((k * 73 + 41 + 5 * (k >> 8)) & 0xFF).astype(np.uint8).view(dtype),)
