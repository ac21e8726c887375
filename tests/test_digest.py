"""A tensor has one digest, whoever computes it: the host, as the bytes come, or the device that holds it."""

import pytest
import torch
import xxhash

from sync import digest
from sync.digest import CHUNK_BYTES, StreamDigest, device_digests, raw_bytes, tensor_digest, tensor_digests
from sync.manifest import SAFETENSORS_DTYPES

SIZES = (0, 1, 7, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 24)


def random_bytes(number: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (number,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def chunk_by_chunk(data: bytes) -> str:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks))


def test_a_digest_is_that_of_its_chunks_digests_however_the_bytes_come() -> None:
    data = raw_bytes(random_bytes(3 * CHUNK_BYTES + 100))
    for step in (1000, CHUNK_BYTES // 2, CHUNK_BYTES, CHUNK_BYTES + 1, 1 << 30):
        found = StreamDigest()
        for at in range(0, len(data), step):
            found.update(data[at : at + step])
        assert found.hexdigest() == chunk_by_chunk(bytes(data)), step


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_a_device_finds_the_hosts_digest_for_each_dtype_and_size(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = {}
    for size in SIZES:
        data = random_bytes(size // kind.itemsize * kind.itemsize, size)
        tensors[f"{size} bytes"] = (data & 1 if kind is torch.bool else data).view(kind)
    tensors["a scalar"] = torch.ones((), dtype=kind)
    tensors["rows from the middle of an odd matrix"] = tensors[f"{SIZES[-1]} bytes"][3:].view(-1, 1)[1:]
    tensors["not contiguous"] = (
        random_bytes(64 * 48 * kind.itemsize).bitwise_and(1).view(kind).view(64, 48).t()
    )
    found = device_digests(tensors)
    assert found == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert found["not contiguous"] == chunk_by_chunk(bytes(raw_bytes(tensors["not contiguous"])))


def test_tensors_larger_than_what_is_digested_at_a_time_and_smaller_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "GROUP_BYTES", 4 * CHUNK_BYTES)
    tensors = {str(n): random_bytes(n * 50_001, n) for n in (1, 2, 3, 20, 1, 6)}
    assert device_digests(tensors) == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert device_digests({}) == {}


def test_any_bit_that_flips_is_seen_by_a_device() -> None:
    data = random_bytes(2 * CHUNK_BYTES)
    before = device_digests({"a": data})
    for place in (0, 7, 1023, 1024, 40_000, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES - 1):
        data[place] ^= 16
        assert device_digests({"a": data}) != before, place
        data[place] ^= 16


def test_of_a_devices_tensor_next_to_nothing_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.nbytes) or to_host(tensor))
    device_digests({"a": random_bytes(16 * CHUNK_BYTES + 5)})
    assert sum(copied) == 16 * 64 + 5


def test_each_digest_is_computed_where_its_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "device_digests", lambda tensors: dict.fromkeys(tensors, "there"))
    host = random_bytes(10)
    found = tensor_digests({"a": host, "b": torch.empty(10, device="meta")})
    assert found == {"a": tensor_digest(host), "b": "there"}
