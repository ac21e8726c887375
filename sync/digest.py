"""Digests of tensors: xxh3-128 (Collet, xxHash 0.8) of the xxh3-128 of each 64 KiB of their bytes, in order.

The host's processor computes them with the xxhash library. A GPU computes the very same digests with a few
tensor operations, so that what an engine holds there is attested without a copy to the host. It digests all
chunks at the same time, and within each chunk one block of 1 KiB after the other: this is why a digest is
taken of chunks and not of the whole. One element more or less, or one bit, changes it.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 16
BLOCK_BYTES = 1 << 10
"""Bytes after which xxh3 scrambles its eight accumulators."""
BLOCKS = CHUNK_BYTES // BLOCK_BYTES
GROUP_BYTES = 64 << 20
"""Bytes that are digested at the same time on a device, which needs five times as much memory meanwhile."""

_Words = NDArray[np.uint64]

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
START = (PRIME_32[2], *PRIME_64[:4], PRIME_32[1], PRIME_64[4], PRIME_32[0])
"""The accumulators of xxh3, and the constants that it is made of."""
LOW = 0xFFFFFFFF


class StreamDigest:
    """The digest of bytes that come a part at a time."""

    def __init__(self) -> None:
        self._chunks, self._open, self._num_open = xxhash.xxh3_128(), xxhash.xxh3_128(), 0

    def update(self, data: Any) -> None:
        """Adds bytes. `data`: any buffer."""
        data, begin = memoryview(data), 0
        if self._num_open:
            begin = min(CHUNK_BYTES - self._num_open, len(data))
            self._fill_chunk(data[:begin])
        end = begin + (len(data) - begin) // CHUNK_BYTES * CHUNK_BYTES
        for at in range(begin, end, CHUNK_BYTES):
            self._chunks.update(xxhash.xxh3_128_digest(data[at : at + CHUNK_BYTES]))
        if end < len(data):
            self._fill_chunk(data[end:])

    def hexdigest(self) -> str:
        """Returns the digest of all bytes. No more may be added."""
        if self._num_open:
            self._chunks.update(self._open.digest())
        return self._chunks.hexdigest()

    def _fill_chunk(self, data: memoryview) -> None:
        self._open.update(data)
        self._num_open += len(data)
        if self._num_open == CHUNK_BYTES:
            self._chunks.update(self._open.digest())
            self._open.reset()
            self._num_open = 0


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the tensor's bytes, without a copy where it is contiguous and on the CPU."""
    return memoryview(_bytes_of(tensor.detach().cpu()).numpy())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [n] uint8, on the tensor's device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    digest = StreamDigest()
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def digest_pieces(data: memoryview, head: int = 0) -> list[bytes]:
    """Returns the digests, 16 bytes each, of the first `head` bytes and of each chunk after them.

    With the bytes of a tensor up to its next chunk as the head, these are the tensor's own chunks.
    """
    pieces = [data[:head]] if head else []
    pieces += [data[at : at + CHUNK_BYTES] for at in range(head, len(data), CHUNK_BYTES)]
    return [xxhash.xxh3_128_digest(piece) for piece in pieces]


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the digests by name, each computed where its tensor is."""
    on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    elsewhere = {name: tensor for name, tensor in tensors.items() if name not in on_host}
    return {name: tensor_digest(tensor) for name, tensor in on_host.items()} | device_digests(elsewhere)


def device_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the digests by name, computed on the tensors' device.

    The host receives 64 bytes a chunk, and the bytes of each tensor after its last whole chunk.
    """
    found = {name: xxhash.xxh3_128() for name in tensors}
    group: list[tuple[str, torch.Tensor]] = []
    free = GROUP_BYTES
    for name, tensor in tensors.items():
        for piece in _bytes_of(tensor).split(GROUP_BYTES):
            if len(piece) > free:
                _digest_group(group, found)
                group, free = [], GROUP_BYTES
            group.append((name, piece))
            free -= len(piece)
    _digest_group(group, found)
    return {name: digest.hexdigest() for name, digest in found.items()}


def _digest_group(group: Iterable[tuple[str, torch.Tensor]], found: Mapping[str, Any]) -> None:
    """Adds a group's bytes to the digests of their tensors."""
    wholes, rests = [], []
    for _, piece in group:
        end = len(piece) // CHUNK_BYTES * CHUNK_BYTES
        wholes.append(piece[:end])
        rests.append(piece[end:])
    if not wholes:
        return
    chunks, rest = memoryview(_chunk_digests(torch.cat(wholes))), raw_bytes(torch.cat(rests))
    for (name, _), whole, tail in zip(group, wholes, rests, strict=True):
        size = len(whole) // CHUNK_BYTES * 16
        found[name].update(chunks[:size])
        chunks = chunks[size:]
        if len(tail):
            found[name].update(xxhash.xxh3_128_digest(rest[: len(tail)]))
            rest = rest[len(tail) :]


def _chunk_digests(data: torch.Tensor) -> bytes:
    """Returns the xxh3-128 of each chunk of `data`, [n · CHUNK_BYTES] uint8."""
    if not len(data):
        return b""
    stripes = data.view(torch.int64).view(-1, BLOCKS, 16, 8)
    keys, scramble, start = (torch.from_numpy(words).to(data.device) for words in _load_constants())
    keyed = stripes ^ keys
    products = (keyed & LOW).mul_(keyed.bitwise_right_shift_(32).bitwise_and_(LOW))
    neighbors = stripes.view(-1, BLOCKS, 16, 4, 2).flip(-1).view_as(stripes)
    blocks = products.add_(neighbors).sum(2)
    accumulators = start.repeat(len(stripes), 1)
    for block in range(BLOCKS - 1):
        accumulators += blocks[:, block]
        accumulators ^= (accumulators >> 47) & 0x1FFFF
        accumulators ^= scramble
        accumulators *= PRIME_32[0]
    accumulators += blocks[:, -1]
    return _merge_accumulators(accumulators.cpu().numpy().view(np.uint64))


@cache
def _load_constants() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the keys of the stripes [BLOCKS, 16, 8], the key that scrambles the accumulators [8], and their
    first values [8]."""
    keys = np.stack([_secret_words(8 * stripe) for stripe in range(16)])
    every = np.broadcast_to(keys, (BLOCKS, 16, 8)).copy()
    # The last stripe of a chunk has a key of its own.
    every[-1, -1] = _secret_words(len(SECRET) - 64 - 7)
    start = np.array(START, np.uint64)
    return every.view(np.int64), _secret_words(len(SECRET) - 64).view(np.int64), start.view(np.int64)


def _secret_words(begin: int) -> _Words:
    """Returns [8] words of the secret, from this byte on."""
    return np.frombuffer(SECRET[begin : begin + 64], "<u8").astype(np.uint64)


def _merge_accumulators(accumulators: _Words) -> bytes:
    """Returns the digests, 16 bytes each, of the accumulators [n, 8] of chunks."""
    size = CHUNK_BYTES
    low = _merge_half(accumulators, _secret_words(11), size * PRIME_64[0])
    high = _merge_half(accumulators, _secret_words(len(SECRET) - 64 - 11), ~(size * PRIME_64[1]))
    return np.stack([high, low], 1).astype(">u8").tobytes()


def _merge_half(accumulators: _Words, secret: _Words, start: int) -> _Words:
    """Returns one half of each digest [n] of the accumulators [n, 8]: xxh3's merge and avalanche."""
    keyed = accumulators ^ secret
    a, b = keyed[:, ::2], keyed[:, 1::2]
    words = (np.uint64(start % 2**64) + _folded_product(a, b).sum(1, dtype=np.uint64)).astype(np.uint64)
    words ^= words >> np.uint64(37)
    words *= np.uint64(0x165667919E3779F9)
    return words ^ (words >> np.uint64(32))


def _folded_product(a: _Words, b: _Words) -> _Words:
    """Returns the upper 64 bits of the product, xor the lower ones."""
    low, half = np.uint64(LOW), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    lowest, middle = a_low * b_low, a_high * b_low
    cross = (lowest >> half) + (middle & low) + a_low * b_high
    upper: _Words = (middle >> half) + (cross >> half) + a_high * b_high
    lower: _Words = (cross << half) | (lowest & low)
    return upper ^ lower
