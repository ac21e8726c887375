"""The served reward model: batches score as single inputs do, and bad requests are refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from stub_server import send_raw, serve_answers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from generators.rewards.composition import PartFailed, make_parts
from slipstream.reward_model import RewardClassifier, RewardModelListener, ScoreBatcher

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789<>|\n?+"
TEXTS = ["a", "what is 1 + 1?", "b" * 60, "abc abc", "z", "0123456789" * 5]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
LONGEST = 64


def make_model(folder: Path, padding: int | None, num_labels: int = 1, template: str | None = None) -> str:
    """Makes a tiny classifier of random weights, whose tokens are letters."""
    torch.manual_seed(0)
    words = {letter: number for number, letter in enumerate(["<unk>", "<pad>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=LONGEST,
        num_labels=num_labels, pad_token_id=padding,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("plain"), padding=1, template=TEMPLATE)


def load_classifier(folder: str, label: int | None = None) -> RewardClassifier:
    return RewardClassifier(folder, "cpu", torch.float32, label, join="\n")


@pytest.fixture(scope="module")
def listener(folder: str) -> Iterator[RewardModelListener]:
    """Batches of exactly four, or what comes within a tenth of a second."""
    classifier = load_classifier(folder)
    batcher = ScoreBatcher(classifier, max_batch=4, batch_tokens=4 * LONGEST, wait_s=0.1)
    listener = RewardModelListener(("127.0.0.1", 0), classifier, batcher, LONGEST, None, "tiny")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield listener
    listener.shutdown()
    thread.join()
    listener.server_close()


@pytest.fixture
def client(listener: RewardModelListener) -> Iterator[httpx2.Client]:
    url = f"http://127.0.0.1:{listener.server_port}"
    with httpx2.Client(base_url=url, trust_env=False, timeout=120) as client:
        yield client


@pytest.mark.parametrize("padding", [1, None], ids=["pad token", "no pad token"])
def test_a_batch_scores_as_single_inputs_do_and_as_transformers_does(
    padding: int | None, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, padding)
    classifier = load_classifier(folder)
    inputs = [classifier.encode_text(text) for text in TEXTS]
    assert [len(one) for one in inputs] == [len(text) for text in TEXTS]
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([one])).logits.item() for one in inputs]
    assert len({round(score, 4) for score in alone}) == len(TEXTS)
    assert classifier.score_batch(inputs) == pytest.approx(alone, abs=1e-4)
    assert [classifier.score_batch([one])[0] for one in inputs] == pytest.approx(alone, abs=1e-4)
    assert classifier.score_batch(inputs[::-1]) == pytest.approx(alone[::-1], abs=1e-4)


def test_the_probability_of_a_class_is_the_score_of_a_model_with_several(tmp_path: Path) -> None:
    folder = make_model(tmp_path, 1, num_labels=3)
    inputs = [load_classifier(folder, 0).encode_text(text) for text in TEXTS]
    scores = torch.tensor([load_classifier(folder, label).score_batch(inputs) for label in range(3)])
    assert torch.allclose(scores.sum(0), torch.ones(len(TEXTS)), atol=1e-5) and (scores > 0).all()
    for label in (None, 3, -1):
        with pytest.raises(ValueError, match="--label must"):
            load_classifier(folder, label)


def test_requests_at_the_same_time_share_batches(
    listener: RewardModelListener, client: httpx2.Client
) -> None:
    classifier, before = listener.classifier, listener.batcher.counts.batches
    held, release = threading.Event(), threading.Event()
    score_batch = classifier.score_batch

    def score_late(inputs: list[list[int]]) -> list[float]:
        held.set()
        assert release.wait(60)
        return score_batch(inputs)

    classifier.score_batch = score_late  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(9) as pool:
            ask = [pool.submit(client.post, "/score", json={"texts": ["first"]})]
            assert held.wait(60)
            # These eight wait while the first is scored, and then make two batches of four.
            ask += [pool.submit(client.post, "/score", json={"texts": [f"text {i}"]}) for i in range(8)]
            while listener.batcher._queue.qsize() < 8:
                assert not any(one.done() for one in ask)
                time.sleep(0.01)
            release.set()
            scores = [one.result().json()["scores"][0] for one in ask]
    finally:
        classifier.score_batch = score_batch  # type: ignore[method-assign]
    assert listener.batcher.counts.batches - before == 3 and listener.batcher.counts.largest_batch == 4
    alone = [
        score_batch([classifier.encode_text(text)])[0] for text in ["first", *(f"text {i}" for i in range(8))]
    ]
    assert scores == pytest.approx(alone, abs=1e-4)
    health = client.get("/health").json()
    assert health["model"] == "tiny" and health["batches"] == listener.batcher.counts.batches


def test_a_batch_has_no_more_tokens_than_it_may(folder: str) -> None:
    classifier, sizes = load_classifier(folder), []
    score_batch, release = classifier.score_batch, threading.Event()

    def note_size(inputs: list[list[int]]) -> list[float]:
        assert release.wait(60)
        sizes.append(len(inputs) * max(map(len, inputs)))
        return score_batch(inputs)

    classifier.score_batch = note_size  # type: ignore[method-assign]
    batcher = ScoreBatcher(classifier, max_batch=32, batch_tokens=100, wait_s=0.2)
    futures = [batcher.submit_input(classifier.encode_text("a" * n)) for n in (60, 60, 40, 10, 10, 10, 50, 1)]
    release.set()
    assert len([future.result(60) for future in futures]) == 8
    assert max(sizes) <= 100 and len(sizes) < 8


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "the body must be JSON"),
        (b"\xff", "the body must be JSON"),
        (b"[" * 100_000, "the body must be JSON"),
        (b"[]", 'the body must be {"texts"'),
        (b"{}", 'the body must be {"texts"'),
        (b'{"texts": ["a"], "conversations": []}', 'the body must be {"texts"'),
        (b'{"texts": []}', "texts must be a list of 1 to 1024 inputs"),
        (b'{"texts": "a"}', "texts must be a list of 1 to 1024 inputs"),
        (b'{"texts": [1]}', "texts must be texts"),
        (b'{"texts": [""]}', "input 0 must have 1 to 64 tokens, got 0"),
        (b'{"texts": ["\\ud800"]}', "texts must be Unicode"),
        (json.dumps({"texts": ["a", "b" * 65]}).encode(), "input 1 must have 1 to 64 tokens, got 65"),
        (b'{"conversations": [[]]}', "conversations must be lists of messages"),
        (b'{"conversations": [[{"role": "user"}]]}', "conversations must be lists of messages"),
        (
            b'{"conversations": [[{"role": "user", "content": null}]]}',
            "conversations must be lists of messages",
        ),
    ],
)
def test_a_bad_request_is_refused_and_the_next_is_answered(
    body: bytes, sentence: str, client: httpx2.Client
) -> None:
    answer = client.post("/score", content=body)
    assert answer.status_code == 400 and sentence in answer.json()["error"]
    assert client.post("/score", json={"texts": ["a"]}).status_code == 200


def test_other_requests_are_refused_with_their_status(
    client: httpx2.Client, listener: RewardModelListener
) -> None:
    assert client.get("/score").status_code == client.post("/health", json={}).status_code == 404
    connection = HTTPConnection("127.0.0.1", listener.server_port)
    connection.putrequest("POST", "/score")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert client.post("/score", content=iter([b"{}"])).status_code == 411
    listener.key = "secret"
    try:
        assert client.post("/score", json={"texts": ["a"]}).status_code == 401
        assert client.get("/health", headers={"Authorization": "Bearer Secret"}).status_code == 401
        assert client.get("/health", headers={"Authorization": "Bearer secret"}).status_code == 200
    finally:
        listener.key = None


def test_a_batch_that_fails_is_an_error_of_its_requests_alone(
    client: httpx2.Client, listener: RewardModelListener
) -> None:
    classifier = listener.classifier
    score_batch = classifier.score_batch

    def run_out(inputs: Any) -> list[float]:
        raise RuntimeError("out of memory")

    classifier.score_batch = run_out  # type: ignore[method-assign]
    try:
        answer = client.post("/score", json={"texts": ["a"]})
        classifier.score_batch = lambda inputs: [float("nan")] * len(inputs)  # type: ignore[method-assign]
        other = client.post("/score", json={"texts": ["a"]})
    finally:
        classifier.score_batch = score_batch  # type: ignore[method-assign]
    assert answer.status_code == 500 and "out of memory" in answer.json()["error"]
    assert other.status_code == 500 and "scores must be finite" in other.json()["error"]
    assert client.post("/score", json={"texts": ["a"]}).status_code == 200


# ---- the part


def test_the_part_sends_the_conversation_and_its_number_is_the_score(listener: RewardModelListener) -> None:
    url = f"http://127.0.0.1:{listener.server_port}/"
    parts = make_parts([{"use": "reward_model", "url": url, "timeout_s": 100, "weight": 2}])
    score = parts.rate_reply({"prompt": "1 + 1?"}, "2")
    classifier = listener.classifier
    wanted = classifier.score_batch([classifier.encode_text("<user>1 + 1?<assistant>2")])[0]
    assert score.components["reward_model"] == pytest.approx(wanted, abs=1e-4)
    assert score.reward == pytest.approx(2 * wanted, abs=1e-4) and "seconds/reward_model" in score.components
    with pytest.raises(PartFailed, match="got 400: .*input 0 must have 1 to 64 tokens, got"):
        parts.rate_reply({"prompt": "1 + 1?"}, "2" * 100)


def test_without_a_chat_template_the_messages_are_joined(tmp_path: Path) -> None:
    classifier = load_classifier(make_model(tmp_path, 1))
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert classifier.encode_messages(messages) == classifier.encode_text("ab\nc")


@pytest.mark.parametrize("body", [b"[]", b'{"scores": []}', b'{"scores": ["1"]}', b'{"scores": [true]}'])
def test_an_answer_that_is_no_score_fails_the_attempt(body: bytes) -> None:
    with serve_answers(send_raw(body)) as server:
        parts = make_parts([{"use": "reward_model", "url": server.url}])
        with pytest.raises(PartFailed, match="a reward model must answer with one score"):
            parts.rate_reply({"prompt": "1?"}, "1")


# ---- the program


def start_program(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.reward_model", *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ.copy(),
    )  # fmt: skip


def test_the_program_serves_a_folder_until_it_is_told_to_end(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_KEY", "secret")
    with start_program("--model", folder, "--port", "0", "--key-env", "RM_KEY") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:4] == ["The", "reward", "model", folder], process.communicate()
            parts = make_parts(
                [{"use": "reward_model", "url": line[-1], "timeout_s": 100, "key_env": "RM_KEY"}]
            )
            wanted = load_classifier(folder).score_batch(
                [load_classifier(folder).encode_text("<user>a<assistant>b")]
            )
            assert parts.rate_reply({"prompt": "a"}, "b").reward == pytest.approx(wanted[0], abs=1e-4)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "/nowhere"], "the reward model cannot be served"),
        (["--model", "m", "--host", "0.0.0.0"], "--host must be one of"),
        (["--model", "m", "--max-batch", "0"], "--max-batch must be at least 1, got 0"),
        (["--model", "m", "--key-env", "NO_SUCH_KEY"], "--key-env must name an environment variable"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_serve_says_why(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from slipstream import reward_model

    monkeypatch.setattr(sys, "argv", ["reward_model", "--device", "cpu", *words])
    with pytest.raises(SystemExit) as ended:
        reward_model.main()
    assert sentence in str(ended.value) + capsys.readouterr().err
