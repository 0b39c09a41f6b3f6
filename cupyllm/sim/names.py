"""What the bytes at an address are called in a report: tile[12], out[3,5], "4 bytes, right after the end of x".

What follows a comma and a blank is said behind the source line (report.py), so that it is not read as part of it:
"reads 4 bytes at k.cu:3, right after the end of x (8 bytes)".

Elements of shared variables are counted in items of the access, because PTX declares every array as bytes.
"""

from __future__ import annotations

import re

from cupyllm.sim.memory import DeviceMemory, Extent

_LAST = re.compile(r"E(\d+)(\w+)$")
NULL_BYTES = 1 << 20  # addresses below this are called null, index included


def plain_name(symbol: str) -> str:
    """The C name in a mangled one, say `tile` of _ZZ21attention_forward_bf16E4tile; the symbol itself if unmangled."""
    if not symbol.startswith("_Z"):
        return symbol
    local = _LAST.search(symbol)
    if local and len(local[2]) >= int(local[1]):
        return local[2][: int(local[1])]
    position, name = 3 if symbol.startswith("_ZN") else 2, symbol
    while match := re.match(r"L?(\d+)", symbol[position:]):  # names as <length><text>, one after another
        start = position + match.end()
        position = start + int(match[1])
        name = symbol[start:position]
    return name


def element(extent: Extent, offset: int, size: int) -> str:
    """The element of an argument or variable at byte `offset`, which may be negative or beyond its end."""
    if not 0 <= offset < extent.nbytes:
        return outside(extent.name, offset, extent.nbytes, size)
    index, rest = divmod(offset, extent.itemsize)
    subscript = str(index)
    if len(extent.shape) > 1:
        parts = []
        for length in reversed(extent.shape):
            index, part = divmod(index, length)
            parts.append(str(part))
        subscript = ",".join(reversed(parts))
    tail = f" byte {rest}" if rest else ""
    return f"{extent.name}[{subscript}]{tail}"


def item(name: str, offset: int, nbytes: int, itemsize: int, size: int) -> str:
    """The same for a shared or local variable of `nbytes`, counted in items of the access."""
    if not 0 <= offset < nbytes:
        return outside(name, offset, nbytes, size)
    index, rest = divmod(offset, itemsize)
    return f"{name}[{index}]" + (f" byte {rest}" if rest else "")


def outside(name: str, offset: int, nbytes: int, size: int) -> str:
    """An address that an array of `nbytes` does not have."""
    if offset < 0:
        return f"{_bytes(size)}, {_bytes(-offset)} before the start of {name}"
    distance = "right" if offset == nbytes else _bytes(offset - nbytes)
    return f"{_bytes(size)}, {distance} after the end of {name} ({_bytes(nbytes)})"


def crossing(text: str, offset: int, nbytes: int, size: int) -> str:
    """`text` names an element inside; says so where the access runs over the end."""
    return f"{text}, {_bytes(size)} that run over its end ({_bytes(nbytes)})" if 0 <= offset < nbytes else text


def unknown(memory: DeviceMemory, address: int, size: int) -> str:
    """A device address that belongs to no argument."""
    if address < NULL_BYTES:
        return f"{_bytes(size)}, through a null pointer" + (f" plus {_bytes(address)}" if address else "")
    found = memory.find(address)
    if found is None:
        return f"{_bytes(size)}, address {address:#x}, which is in no live allocation"
    return f"{_bytes(size)}, {_bytes(address - found.address)} into {found.name or 'an allocation'}"


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"
