"""Stand-ins for the C headers that .cu files include, which NVRTC does not have.

NVRTC knows math functions, printf, assert and the vector types without any header, so most of these need not say
anything; the others define the integer types and the limits. They come last in the search, behind the user's folders
and CUDA's own. C++ headers (type_traits, limits) are not among them: those of libcudacxx can be named with --include.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from cupyllm.files import storage_error

_STDINT = """#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
#define INT8_MAX 127
#define INT8_MIN (-128)
#define UINT8_MAX 255
#define INT16_MAX 32767
#define INT16_MIN (-32768)
#define UINT16_MAX 65535
#define INT32_MAX 2147483647
#define INT32_MIN (-2147483647 - 1)
#define UINT32_MAX 4294967295u
#define INT64_MAX 9223372036854775807ll
#define INT64_MIN (-9223372036854775807ll - 1)
#define UINT64_MAX 18446744073709551615ull
"""
_IN_STD = """namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t;
}
"""
_STDDEF = """#pragma once
typedef long ptrdiff_t;
#ifndef NULL
#define NULL 0
#endif
#ifndef offsetof
#define offsetof(type, member) ((size_t)&((type*)0)->member)
#endif
"""
_MATH = """#pragma once
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif
"""
_FLOAT = """#pragma once
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
"""
_LIMITS = """#pragma once
#define CHAR_BIT 8
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-9223372036854775807ll - 1)
#define ULLONG_MAX 18446744073709551615ull
"""
_NOTHING = "#pragma once\n"
HEADERS = {
    "stdint.h": _STDINT,
    "cstdint": f'#pragma once\n#include "stdint.h"\n{_IN_STD}',
    **dict.fromkeys(("stddef.h", "cstddef"), _STDDEF),
    **dict.fromkeys(("math.h", "cmath"), _MATH),
    **dict.fromkeys(("float.h", "cfloat"), _FLOAT),
    **dict.fromkeys(("limits.h", "climits"), _LIMITS),
    **dict.fromkeys(("stdio.h", "cstdio", "stdlib.h", "cstdlib", "assert.h", "cassert"), _NOTHING),
    **dict.fromkeys(("string.h", "cstring", "cuda_runtime.h", "device_launch_parameters.h"), _NOTHING),
}


def standard_headers(cache: Path) -> Path:
    """A folder inside `cache` with the headers, written once. Raises StorageError."""
    digest = hashlib.sha256(repr(HEADERS).encode()).hexdigest()[:16]
    folder = cache / f"include-{digest}"
    try:
        folder.mkdir(exist_ok=True)
        for name, text in HEADERS.items():
            if not (folder / name).exists():
                temporary = folder / f".{secrets.token_hex(8)}"
                temporary.write_text(text)
                os.replace(temporary, folder / name)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder
