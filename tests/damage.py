"""Sound PNG files of every kind, written by hand, and damage done to files of any format."""

import struct
import zlib

import numpy as np

# of PNG's colour types: grey, RGB, palette, grey and alpha, RGBA
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PASSES = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)
TRANSPARENT = {0: struct.pack(">H", 1), 2: struct.pack(">3H", 1, 2, 3), 3: bytes([0, 128])}


def chunk(kind, content):
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def rows(pixels, depth):
    for row in pixels:
        if depth == 16:
            yield b"\0" + row.astype(">u2").tobytes()
        else:
            bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
            yield b"\0" + np.packbits(bits).tobytes()


def png(color, depth, *, interlaced=False, transparent=False, width=37, height=23, stated=None):
    """A PNG of random pixels; `stated` is the size that its header tells in the place of the true
    one.
    """
    random = np.random.default_rng(depth)
    pixels = random.integers(0, 2**depth, (height, width, CHANNELS[color]))
    parts = [pixels[y::down, x::right] for y, x, down, right in PASSES] if interlaced else [pixels]
    data = b"".join(row for part in parts if part.size for row in rows(part, depth))
    header = struct.pack(">IIBBBBB", *(stated or (width, height)), depth, color, 0, 0, interlaced)
    palette = (
        random.integers(0, 256, 3 * 2**depth, dtype=np.uint8).tobytes() if color == 3 else None
    )
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"PLTE", palette) if palette else b"",
            chunk(b"tRNS", TRANSPARENT[color]) if transparent else b"",
            chunk(b"IDAT", zlib.compress(data)),
            chunk(b"IEND", b""),
        ]
    )


def damaged(content, random):
    """Bits flipped anywhere, bytes of the header replaced, or a piece cut out."""
    spoiled, kind = bytearray(content), random.randrange(3)
    if kind == 0:
        for _ in range(random.choice((1, 3, 10, 40))):
            spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    elif kind == 1:
        for _ in range(random.choice((1, 3))):
            spoiled[random.randrange(min(len(spoiled), 60))] = random.randrange(256)
    else:
        first = random.randrange(len(spoiled))
        del spoiled[first : first + random.randrange(1, 30)]
    return bytes(spoiled)


def flipped(content, random, count=8):
    """Damage that a PNG's checksums always show: bits flipped behind its signature."""
    spoiled = bytearray(content)
    for place in random.sample(range(8, len(spoiled)), count):
        spoiled[place] ^= 1 << random.randrange(8)
    return bytes(spoiled)
