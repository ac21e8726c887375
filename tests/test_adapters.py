"""Versions that hold adapters only: a host makes a whole model of them once, or refuses to."""

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sync import merged_folder
from sync.adapters import PEFT_PREFIX, describe_adapters
from sync.announcement import announce_version
from sync.folders import shared_memory_folder
from sync.manifest import DigestMismatch
from sync.merged_folder import MergedFolder
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports.cuda_ipc import DeviceCopy

SCALING = 1.5
ADAPTED = [
    f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.k_proj", "mlp.down_proj")
]


def make_adapters(seed: int, base: dict[str, Tensor], rank: int = 4) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name in ADAPTED:
        rows, columns = base[f"{name}.weight"].shape
        found[f"{PEFT_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        found[f"{PEFT_PREFIX}{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return found


def merge_by_hand(
    base: dict[str, Tensor], adapters: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    found = {name: tensor.double() for name, tensor in base.items()}
    for name in ADAPTED:
        a, b = (adapters[f"{PEFT_PREFIX}{name}.lora_{matrix}.weight"].double() for matrix in "AB")
        found[f"{name}.weight"] += SCALING * (b @ a)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def expect_tensors(snapshot: Snapshot, expected: dict[str, Tensor]) -> None:
    snapshot.verify_bytes()
    found = dict(snapshot.named_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], atol=1e-5, rtol=1e-2 if tensor.dtype is torch.bfloat16 else 0
        )


def make_model(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> dict[str, Tensor]:
    """A tied model whose folder has the head too, as some have. Returns the tensors that belong to it."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    ).to(dtype)  # fmt: skip
    model.save_pretrained(folder, max_shard_size=shard)
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    return tmp_path / "model", make_model(tmp_path / "model")


@pytest.fixture
def publisher(tmp_path: Path, model: tuple[Path, dict[str, Tensor]]) -> Iterator[Publisher]:
    publisher = Publisher(
        tmp_path / "weights", "life", adapter=describe_adapters(model[0], "float32", SCALING)
    )
    yield publisher
    publisher.close()


@pytest.fixture
def subscriber(publisher: Publisher) -> Iterator[Callable[[], Subscriber]]:
    """Opens subscribers, each of a generator of this host. When all are closed, nothing stays in shared
    memory."""
    there: list[Subscriber] = []

    def join() -> Subscriber:
        there.append(Subscriber())
        return there[-1]

    yield join
    for one in there:
        one.close()
    assert not folder_of(publisher).exists()


def folder_of(publisher: Publisher) -> Path:
    folder = MergedFolder(publisher.folder)._shared.path
    assert folder.parent == shared_memory_folder("").parent
    return folder


Model = tuple[Path, dict[str, Tensor]]
Join = Callable[[], Subscriber]


def test_a_host_makes_the_whole_model_once_for_all_its_engines(
    publisher: Publisher, subscriber: Join, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = itertools.count(), merged_folder.merge_adapters
    monkeypatch.setattr(merged_folder, "merge_adapters", lambda snapshot: (next(made), make(snapshot))[1])
    with ThreadPoolExecutor(4) as pool:
        for version in range(3):
            new = make_adapters(version, model[1])
            manifest = publisher.publish_version(version, whole_parts(new))
            announced, joined = announce_version(manifest), [subscriber() for _ in range(4)]
            taken = list(pool.map(Subscriber.prepare_version, joined, itertools.repeat(announced)))
            for snapshot in taken:
                assert (
                    snapshot.attested
                    and snapshot.manifest.version == version
                    and snapshot.manifest.adapter is None
                )
                expect_tensors(snapshot, merge_by_hand(model[1], new))
            assert len({snapshot.manifest.path for snapshot in taken}) == 1
    assert next(made) == 3


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_base_may_be_in_many_files_and_in_another_dtype(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    base = make_model(folder, torch.bfloat16, shard)
    if shard == "5GB":  # a tied head in the file is not served
        held = load_file(folder / "model.safetensors")
        save_file(
            held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, folder / "model.safetensors"
        )
    for dtype in ("float32", "bfloat16"):
        read: list[int] = []
        recipe = describe_adapters(folder, dtype, SCALING, read.append)
        assert len(read) == len(base) and read[-1] == sum(tensor.nbytes for tensor in base.values())
        publisher = Publisher(tmp_path / dtype, "life", adapter=recipe)
        new, subscriber = make_adapters(0, base), Subscriber()
        snapshot = subscriber.prepare_version(
            announce_version(publisher.publish_version(0, whole_parts(new)))
        )
        expect_tensors(snapshot, merge_by_hand(base, new, getattr(torch, dtype)))
        assert (
            snapshot.view_merged([f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"])
            is not None
        )
        subscriber.close()
        publisher.close()


def test_versions_go_as_snapshots_do_and_a_mapped_one_stays(
    publisher: Publisher, subscriber: Join, model: Model
) -> None:
    one, inodes, held = subscriber(), set(), None
    for version in range(8):
        manifest = publisher.publish_version(version, whole_parts(make_adapters(version, model[1])))
        snapshot = one.prepare_version(announce_version(manifest))
        inodes.add(Path(snapshot.manifest.path).stat().st_ino)
        if version == 2:
            held = snapshot
        one.refresh_spare()
    left = sorted(path.name for path in folder_of(publisher).glob("v*"))
    assert {name.rpartition(".")[0] for name in left} == {"v5-life", "v6-life", "v7-life"}
    assert len(inodes) < 8, "memory is used again"
    assert held is not None
    expect_tensors(held, merge_by_hand(model[1], make_adapters(2, model[1])))


def test_a_killed_processs_leavings_go(publisher: Publisher, subscriber: Join, model: Model) -> None:
    one, new = subscriber(), make_adapters(0, model[1])
    one.prepare_version(announce_version(publisher.publish_version(0, whole_parts(new))))
    for name in ("v0-life.unfinished", "v1-life.unfinished", "v1-life.moving"):
        (folder_of(publisher) / name).write_bytes(b"half")
    expect_tensors(
        one.prepare_version(announce_version(publisher.publish_version(1, whole_parts(new)))),
        merge_by_hand(model[1], new),
    )
    assert {path.suffix for path in folder_of(publisher).glob("v*")}.isdisjoint({".unfinished", ".moving"})


def change_a_number(folder: Path) -> str:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][3] += 1e-3
    save_file(held, folder / "model.safetensors")
    return describe_adapters(folder, "float32", SCALING).base_digest


def change_a_shape(folder: Path) -> str:
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 50)
    save_file(held, folder / "model.safetensors")
    return r"model.layers.0.mlp.down_proj.weight of shape \[32, 50\]"


@pytest.mark.parametrize("change", [change_a_number, change_a_shape])
def test_another_base_is_refused_by_both_names(
    publisher: Publisher, subscriber: Join, model: Model, change: Callable[[Path], str]
) -> None:
    one, new = subscriber(), make_adapters(0, model[1])
    before = one.prepare_version(announce_version(publisher.publish_version(0, whole_parts(new))))
    original = (model[0] / "model.safetensors").read_bytes()
    (model[0] / "model.safetensors").unlink()  # whoever has it mapped keeps it
    (model[0] / "model.safetensors").write_bytes(original)
    got = change(model[0])
    manifest = publisher.publish_version(1, whole_parts(new))
    assert manifest.adapter is not None
    with pytest.raises(ValueError, match=f"the digest {manifest.adapter.base_digest}; got .*{got}"):
        one.prepare_version(announce_version(manifest))
    assert not (folder_of(publisher) / "v1-life.json").exists()
    before.verify_bytes()
    (model[0] / "model.safetensors").write_bytes(original)
    expect_tensors(one.prepare_version(announce_version(manifest)), merge_by_hand(model[1], new))


def test_a_host_without_the_base_is_told_so(
    publisher: Publisher, subscriber: Join, model: Model, tmp_path: Path
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_adapters(0, model[1])))
    model[0].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"model.path must be a folder .* got {model[0]}"):
        subscriber().prepare_version(announce_version(manifest))
    with pytest.raises(ValueError, match="model.path must be a folder"):
        describe_adapters(model[0], "float32", SCALING)


def test_damaged_adapters_and_a_damaged_scaling_are_never_merged(
    publisher: Publisher, subscriber: Join, model: Model
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_adapters(0, model[1])))
    raw, locator = bytearray(Path(manifest.path).read_bytes()), Path(manifest.locator)
    raw[-1] ^= 1
    Path(manifest.path).write_bytes(raw)
    with pytest.raises(DigestMismatch, match="1 of 8 tensors"):
        subscriber().prepare_version(announce_version(manifest))
    assert not folder_of(publisher).exists()
    raw[-1] ^= 1
    Path(manifest.path).write_bytes(raw)
    fields = json.loads(locator.read_bytes())
    fields["adapter"]["scaling"] = 2.0
    locator.write_bytes(msgspec.json.encode(fields))
    with pytest.raises(DigestMismatch, match="does not have the manifest's digest"):
        read_manifest(locator)


def test_a_whole_model_that_was_damaged_is_made_again(
    publisher: Publisher, subscriber: Join, model: Model
) -> None:
    new = make_adapters(0, model[1])
    manifest = publisher.publish_version(0, whole_parts(new))
    path = Path(subscriber().prepare_version(announce_version(manifest)).manifest.path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    for seal in path.parent.glob("v0-life.*-*"):
        seal.unlink()  # as after a boot
    with pytest.raises(DigestMismatch, match="1 of 26 tensors"):
        subscriber().prepare_version(announce_version(manifest))
    expect_tensors(
        subscriber().prepare_version(announce_version(manifest), again=True), merge_by_hand(model[1], new)
    )


def test_in_the_end_a_folder_on_disk_is_the_whole_model(tmp_path: Path, model: Model) -> None:
    publisher = Publisher(
        tmp_path / "disk", "life", model=model[0], adapter=describe_adapters(model[0], "float32", SCALING)
    )
    new = make_adapters(5, model[1])
    for version in (4, 5):
        publisher.publish_version(version, whole_parts(make_adapters(version, model[1])))
    publisher.close()
    assert {path.suffix for path in publisher.folder.iterdir()} == {".json", ".safetensors"}
    loaded, expected = AutoModelForCausalLM.from_pretrained(publisher.folder), merge_by_hand(model[1], new)
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-5, rtol=0)
    assert not folder_of(publisher).exists()


def test_adapters_are_not_offered_on_a_device(tmp_path: Path, model: Model) -> None:
    folder, adapter = tmp_path / "gpu", describe_adapters(model[0], "float32", SCALING)
    device = DeviceCopy(folder, "gpu", torch.device("cuda"), always=True)
    publisher = Publisher(folder, "life", ends=[device], adapter=adapter)
    publisher.publish_version(0, whole_parts(make_adapters(0, model[1])))
    assert not list(folder.glob("*.ipc"))
    publisher.close()
