"""The claims on every real engine: versions in flight, digests, samples and log-probabilities.

A test module imports these tests, and has fixtures of these names of its own: `tied` has a tied head and an
end of sequence, `untied` has neither, `recompute` has a tied head, computes KV anew and samples at
temperature 0.7, and `rig` is each of them. A Hugging Face forward pass judges an engine's numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rig import END, TOLERANCE, EngineRig, make_prompts
from transformers import DynamicCache

from generators.engine import Completion, Sample
from sync import snapshot
from sync.manifest import DigestMismatch, Manifest
from sync.snapshot import Snapshot


def cross(rig: EngineRig, steps: int = 20) -> tuple[Manifest, Manifest, list[tuple[Sample, Completion, int]]]:
    """Makes samples that begin under model 0 and end under model 1. Each comes with the number of tokens that
    it had at the update."""
    before = rig.load_model(0)
    samples = [rig.add_sample(prompt, 40 + i, seed=i) for i, prompt in enumerate(make_prompts(12))]
    done: dict[str, Completion] = {}
    for _ in range(steps):
        done |= {completion.id: completion for completion in rig.engine.step()}
    held = rig.engine.count_sampled_tokens()
    after = rig.load_model(1)
    assert rig.engine.count_sampled_tokens() == held, "an update neither loses nor adds a token"
    done |= rig.finish_samples()
    crossing = [(sample, done[sample.id], held[sample.id]) for sample in samples if sample.id in held]
    assert len(crossing) >= 4, "too few samples met the update: the test would say nothing"
    return before, after, crossing


def test_each_token_carries_the_version_that_sampled_it(rig: EngineRig) -> None:
    before, after, crossing = cross(rig)
    for _, completion, held in crossing:
        count = len(completion.tokens)
        assert completion.versions == [before.version] * held + [after.version] * (count - held)
        assert len(completion.logprobs) == count > held > 0


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_kept_kv_is_the_old_versions_and_what_follows_is_the_new_ones(
    name: str, request: pytest.FixtureRequest
) -> None:
    rig: EngineRig = request.getfixturevalue(name)
    for sample, completion, held in cross(rig)[2]:
        tokens = sample.prompt + completion.tokens
        old, new = (rig.compute_logprobs(model, tokens[:-1]) for model in (0, 1))
        cache = DynamicCache()
        rig.compute_logprobs(0, tokens[: len(sample.prompt) + held - 1], cache)
        mixed = rig.compute_logprobs(1, tokens[len(sample.prompt) + held - 1 : -1], cache)
        until = len(tokens) - len(sample.prompt)
        assert (
            rig.find_difference(sample, completion, old[: len(sample.prompt) + held - 1], 0, held) < TOLERANCE
        )
        assert rig.find_difference(sample, completion, mixed, held, until) < TOLERANCE
        assert rig.find_difference(sample, completion, new, held, until) > 0.1
        assert rig.find_difference(sample, completion, old, held, until) > 0.1


def test_recomputed_kv_leaves_no_trace_of_the_old_version(recompute: EngineRig) -> None:
    for sample, completion, held in cross(recompute)[2]:
        tokens = sample.prompt + completion.tokens
        old, new = (recompute.compute_logprobs(model, tokens[:-1]) for model in (0, 1))
        until = len(tokens) - len(sample.prompt)
        assert (
            recompute.find_difference(sample, completion, old[: len(sample.prompt) + held - 1], 0, held)
            < TOLERANCE
        )
        assert recompute.find_difference(sample, completion, new, held, until) < TOLERANCE


def test_the_digests_are_of_what_the_engine_holds(rig: EngineRig) -> None:
    other, manifest = rig.publish_model(0), rig.load_model(1)
    published = {entry.name: entry.digest for entry in manifest.tensors}
    assert rig.engine.held_digests(manifest) == published
    assert all(digest != published[name] for name, digest in ((e.name, e.digest) for e in other.tensors))


def flip_a_bit(manifest: Manifest) -> None:
    with open(manifest.path, "r+b") as file:
        file.seek(manifest.num_bytes - 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def truncate(manifest: Manifest) -> None:
    with open(manifest.path, "r+b") as file:
        file.truncate(manifest.num_bytes - 1)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_damaged_weights_are_never_served_and_a_good_load_repairs(
    tied: EngineRig, damage: Callable[[Manifest], None]
) -> None:
    before = tied.load_model(0)
    sample = tied.add_sample(make_prompts(1)[0], 30, seed=5)
    tied.engine.step()
    damaged = tied.publish_model(1)
    damage(damaged)
    with pytest.raises(DigestMismatch, match="1 of 24 tensors in the file|bytes"):
        tied.engine.load_version(Snapshot(damaged))
    assert tied.engine.version == before.version, "the old version stays, whole"
    assert tied.engine.held_digests(before) == {entry.name: entry.digest for entry in before.tensors}
    tied.engine.step()
    after = tied.load_model(1)
    completion = tied.finish_samples()[sample.id]
    assert completion.versions[:2] == [before.version] * 2 and set(completion.versions[2:]) == {after.version}


def test_the_same_snapshot_may_be_taken_up_again(tied: EngineRig) -> None:
    snapshot = Snapshot(tied.publish_model(0))
    for _ in range(2):
        tied.engine.load_version(snapshot)
    assert tied.engine.held_digests(snapshot.manifest) == {
        e.name: e.digest for e in snapshot.manifest.tensors
    }
    sample = tied.add_sample(make_prompts(1)[0], 5, seed=0)
    assert len(tied.finish_samples()[sample.id].tokens) == 5


def test_copied_weights_are_sampled_from_as_mapped_ones_are(
    tied: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "unmap_gradually", snapshot._unmap_pieces)
    found = []
    for mapped in (True, False, True):
        monkeypatch.setattr(tied.engine, "_map_weights", mapped)
        for model in (0, 1):
            manifest = tied.load_model(model)
            # What is written lies in no memory of a version before, which is gone by now.
            assert tied.engine.held_digests(manifest) == {e.name: e.digest for e in manifest.tensors}
        sample = tied.add_sample(make_prompts(1)[0], 20, seed=3)
        found.append((done := tied.finish_samples()[sample.id]).tokens + done.logprobs)
    assert found[0] == found[1] == found[2]


def test_a_version_that_is_gone_leaves_the_one_before_in_service(tied: EngineRig) -> None:
    before = tied.load_model(0)
    sample = tied.add_sample(make_prompts(1)[0], 8, seed=1)
    gone = tied.publish_model(1)
    Path(gone.path).unlink()
    with pytest.raises(FileNotFoundError):
        tied.engine.load_version(Snapshot(gone))
    assert tied.engine.version == before.version
    assert set(tied.finish_samples()[sample.id].versions) == {before.version}


def test_a_sample_is_the_same_alone_and_in_a_crowd_to_the_last_bit(rig: EngineRig) -> None:
    rig.load_model(0)
    wanted = [(prompt, 30, seed) for seed, prompt in enumerate(make_prompts(4, length=9))]
    alone = []
    for prompt, max_tokens, seed in wanted:
        sample = rig.add_sample(prompt, max_tokens, seed)
        alone.append(rig.finish_samples()[sample.id])
    for i, prompt in enumerate(make_prompts(40, length=5)):  # more than fit at once: some wait
        rig.add_sample(prompt, 3 + i % 17, seed=1000 + i)
    rig.engine.step()
    samples = [rig.add_sample(*want) for want in wanted]
    done = rig.finish_samples()
    for sample, reference in zip(samples, alone, strict=True):
        assert done[sample.id].tokens == reference.tokens
        assert done[sample.id].logprobs == reference.logprobs
        assert done[sample.id].finish_reason == reference.finish_reason


def test_samples_at_another_temperature_change_no_bit_of_the_others_and_have_their_own(
    recompute: EngineRig,
) -> None:
    """Evaluation at a temperature of its own runs beside training samples. That of the rig is 0.7."""
    recompute.load_model(0)
    prompts = make_prompts(6)
    first = [recompute.add_sample(prompt, 20, seed=i) for i, prompt in enumerate(prompts)]
    alone = recompute.finish_samples()
    again = [recompute.add_sample(prompt, 20, seed=i) for i, prompt in enumerate(prompts)]
    hotter = [replace(sample, id=f"hot-{sample.id}", temperature=1.5) for sample in again]
    for sample in hotter:
        recompute.engine.add_sample(sample)
    recompute.add_sample(prompts[0], 20, seed=0, greedy=True)
    beside = recompute.finish_samples()
    for before, after in zip(first, again, strict=True):
        assert replace(alone[before.id], id="") == replace(beside[after.id], id="")
    for sample in hotter:
        completion = beside[sample.id]
        logits = recompute.compute_logprobs(0, sample.prompt + completion.tokens)
        expected = (logits * 0.7 / 1.5).log_softmax(-1)
        begin, end = len(sample.prompt) - 1, len(sample.prompt) + len(completion.tokens) - 1
        chosen = expected[begin:end].gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert (chosen - torch.tensor(completion.logprobs)).abs().max() < TOLERANCE


def test_different_seeds_give_different_samples(tied: EngineRig) -> None:
    tied.load_model(0)
    samples = [tied.add_sample(make_prompts(1)[0], 20, seed) for seed in range(16)]
    done = tied.finish_samples()
    assert len({tuple(done[sample.id].tokens) for sample in samples}) == 16


def test_a_greedy_sample_takes_the_likeliest_token_each_time(recompute: EngineRig) -> None:
    recompute.load_model(0)
    sample = recompute.add_sample(make_prompts(1)[0], 20, seed=0, greedy=True)
    recompute.add_sample(make_prompts(1)[0], 20, seed=0)
    completion = recompute.finish_samples()[sample.id]
    logprobs = recompute.compute_logprobs(0, sample.prompt + completion.tokens[:-1])
    assert completion.tokens == logprobs[len(sample.prompt) - 1 :].argmax(-1).tolist()


def test_a_sample_ends_at_the_end_of_sequence_or_at_its_length(tied: EngineRig) -> None:
    tied.load_model(0)
    for seed in range(64):
        tied.add_sample(make_prompts(1)[0], 30, seed)
    reasons = set()
    for completion in tied.finish_samples().values():
        reasons.add(completion.finish_reason)
        assert END not in completion.tokens[:-1]
        assert (completion.tokens[-1] == END) == (completion.finish_reason == "stop")
        assert len(completion.tokens) == 30 or completion.finish_reason == "stop"
    assert reasons == {"stop", "length"}


def test_a_forced_sample_goes_on_beyond_the_end_of_sequence_to_the_models_last_place(tied: EngineRig) -> None:
    """The parity probe asks for such samples."""
    tied.load_model(0)
    forced = [
        Sample(id=f"-1/{place}", prompt=prompt, max_tokens=60, seed=place, forced=True)
        for place, prompt in enumerate(make_prompts(8, 100))
    ]
    for sample in forced:
        tied.engine.add_sample(sample)
    done = tied.finish_samples()
    assert any(END in completion.tokens[:-1] for completion in done.values())
    for sample in forced:
        completion = done[sample.id]
        assert len(sample.prompt + completion.tokens) == 160 and completion.finish_reason == "length"
        expected = tied.compute_logprobs(0, sample.prompt + completion.tokens[:-1])
        assert tied.find_difference(sample, completion, expected, 0, 60) < TOLERANCE


def test_a_sample_ends_with_its_own_stop_tokens_and_with_the_models(tied: EngineRig) -> None:
    """A chat template may end turns with another token than the model's configuration."""
    tied.load_model(0)
    prompt = make_prompts(1)[0]
    free = {tied.add_sample(prompt, 30, seed).id: seed for seed in range(16)}
    whole = {free[id]: completion for id, completion in tied.finish_samples().items()}
    other = whole[0].tokens[0]
    for seed in whole:
        sample = Sample(
            id=f"own {seed}", prompt=prompt, max_tokens=30, seed=seed, stop_tokens=frozenset({other})
        )
        tied.engine.add_sample(sample)
    for id, completion in tied.finish_samples().items():
        expected = whole[int(id.split()[1])]
        count = expected.tokens.index(other) + 1 if other in expected.tokens else len(expected.tokens)
        assert completion.tokens == expected.tokens[:count]
        assert completion.logprobs == expected.logprobs[:count]
        assert completion.finish_reason == ("stop" if completion.tokens[-1] in (other, END) else "length")


def test_an_aborted_sample_returns_what_it_had_and_the_others_go_on(untied: EngineRig) -> None:
    untied.load_model(0)
    samples = [
        untied.add_sample(prompt, 25, seed=i) for i, prompt in enumerate(make_prompts(40))
    ]  # 8 of them have to wait
    for _ in range(10):
        assert untied.engine.step() == []
    held = untied.engine.count_sampled_tokens()
    ends = [samples[3].id, samples[39].id]
    aborted = {completion.id: completion for completion in untied.engine.abort_samples([*ends, "unknown"])}
    assert list(aborted) == ends
    for id, completion in aborted.items():
        assert (completion.finish_reason, len(completion.tokens)) == ("abort", held[id])
        assert len(completion.logprobs) == len(completion.versions) == held[id]
    assert [held[id] for id in ends] == [10, 0]
    assert untied.engine.num_unfinished == 38
    done = untied.finish_samples()
    assert done.keys() == {sample.id for sample in samples} - set(ends)
    assert {len(completion.tokens) for completion in done.values()} == {25}


def test_a_sample_that_the_model_cannot_take_is_refused_with_the_numbers(tied: EngineRig) -> None:
    tied.load_model(0)
    with pytest.raises(ValueError, match="max_model_len=160, got 150 . 11"):
        tied.add_sample([2] * 150, 11, seed=0)
    with pytest.raises(ValueError, match="got 0 . 5"):
        tied.add_sample([], 5, seed=0)
    with pytest.raises(ValueError, match="each be at least 1 token, .* got 3 . 0"):
        tied.add_sample([2] * 3, 0, seed=0)
    with pytest.raises(ValueError, match="token ids in 0 .. 79, got 2 .. 80"):
        tied.add_sample([2, 80], 5, seed=0)
    assert tied.engine.num_unfinished == 0
    sample = tied.add_sample([2] * 150, 10, seed=0)
    assert tied.finish_samples()[sample.id].tokens
