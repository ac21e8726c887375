"""Serves a reward model: a Hugging Face sequence classifier behind HTTP, whose requests are batched.

    scripts/reward_model.sh --model FOLDER --port 8100

    POST /score   {"conversations": [[message, ...], ...]} or {"texts": [...]}  ─▶ {"scores": [...]}
    GET /health   the model, and counts of requests, inputs and batches

Requests that come within a few milliseconds share a batch. A conversation becomes text by the tokenizer's
chat template, or without one by `--join`. It listens on this machine alone, unless a key is set.
"""

import argparse
import contextlib
import hmac
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

MAX_BODY = 16 << 20
"""Bytes of a request."""
MAX_INPUTS = 1024
"""Inputs of one request."""
LOOPBACK = ("127.0.0.1", "localhost")
READ_TIMEOUT_S = 60.0
"""Seconds that a client may take over a piece of its request."""


class BadInput(ValueError):
    """The request is at fault; its sender is told so with status 400."""


class RewardClassifier:
    """A sequence classifier with its tokenizer."""

    def __init__(self, path: str, device: str, dtype: torch.dtype, label: int | None, join: str) -> None:
        """`label`: the class whose probability is the score, where the model has several. `join`: stands
        between the messages of a conversation where the tokenizer has no chat template.

        Raises ValueError for a model that cannot score.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._tokenizer_lock = threading.Lock()
        """No tokenizer promises that two threads may use it at once."""
        self._model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).to(device).eval()
        self._device, self._label, self._join = device, label, join
        num_labels = self._model.config.num_labels
        if label is None and num_labels != 1:
            raise ValueError(
                f"--label must be 0 to {num_labels - 1} for a model of several classes, got none"
            )
        if label is not None and (num_labels == 1 or not 0 <= label < num_labels):
            raise ValueError(f"--label must name one of several classes, got {label} of {num_labels}")
        text_config = self._model.config.get_text_config()
        self._text_config, self._padding = text_config, text_config.pad_token_id
        self.longest: int | None = getattr(text_config, "max_position_embeddings", None)

    def encode_text(self, text: str) -> list[int]:
        try:
            with self._tokenizer_lock:
                return list(self._tokenizer.encode(text))
        # Half a surrogate pair is JSON, and no text.
        except (TypeError, ValueError) as error:
            raise BadInput(f"texts must be Unicode: {error}") from error

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Raises BadInput where the chat template refuses the conversation."""
        if not self._tokenizer.chat_template:
            return self.encode_text(self._join.join(message["content"] for message in messages))
        try:
            with self._tokenizer_lock:
                return list(self._tokenizer.apply_chat_template(list(messages), return_dict=False))
        # Templates raise errors of their own, and of Jinja.
        except Exception as error:
            raise BadInput(f"conversations must suit the model's chat template: {error}") from error

    def score_batch(self, inputs: Sequence[list[int]]) -> list[float]:
        """Returns a score for each input, the same as alone within rounding."""
        padding = self._choose_padding(inputs)
        longest = max(map(len, inputs))
        tokens = torch.full((len(inputs), longest), padding, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(inputs):
            # On the right: positions count from the first token, and the score is read at the last one.
            tokens[row, : len(one)] = torch.tensor(one)
            mask[row, : len(one)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device))
        logits = output.logits.float()
        scores = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        return [float(score) for score in scores.cpu()]

    def _choose_padding(self, inputs: Sequence[list[int]]) -> int:
        """Returns the model's padding token. A model without one reads its score at the last token that is
        not padding, so it gets a token that no input has."""
        if self._padding is not None:
            return int(self._padding)
        used = set().union(*inputs)
        padding = next(token for token in range(len(used) + 1) if token not in used)
        self._text_config.pad_token_id = padding
        return padding


@dataclass(slots=True)
class BatchCounts:
    requests: int = 0
    inputs: int = 0
    batches: int = 0
    largest_batch: int = 0


class ScoreBatcher:
    """A thread that scores what other threads submit, in batches."""

    def __init__(
        self, classifier: RewardClassifier, max_batch: int, batch_tokens: int, wait_s: float
    ) -> None:
        """`max_batch` inputs, or `batch_tokens` tokens with padding, are one batch; `wait_s`: how long the
        first of a batch waits for others."""
        self._classifier, self._max_batch, self._batch_tokens = classifier, max_batch, batch_tokens
        self._wait_s = wait_s
        self._queue: queue.SimpleQueue[tuple[list[int], Future[float]]] = queue.SimpleQueue()
        self._next: tuple[list[int], Future[float]] | None = None
        """Did not fit into the last batch."""
        self.counts = BatchCounts()
        threading.Thread(target=self._run_batches, daemon=True, name="batches").start()

    def submit_input(self, tokens: list[int]) -> "Future[float]":
        future: Future[float] = Future()
        self._queue.put((tokens, future))
        return future

    def _run_batches(self) -> None:
        while True:
            batch = self._collect_batch()
            try:
                scores = self._classifier.score_batch([tokens for tokens, _ in batch])
            # Too little memory, say: the requests get the error, and the next batch may do.
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            self.counts.batches += 1
            self.counts.inputs += len(batch)
            self.counts.largest_batch = max(self.counts.largest_batch, len(batch))
            for (_, future), score in zip(batch, scores, strict=True):
                future.set_result(score)

    def _collect_batch(self) -> list[tuple[list[int], "Future[float]"]]:
        batch = [self._next if self._next is not None else self._queue.get()]
        self._next = None
        deadline, longest = time.monotonic() + self._wait_s, len(batch[0][0])
        while len(batch) < self._max_batch:
            try:
                another = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            longest = max(longest, len(another[0]))
            if longest * (len(batch) + 1) > self._batch_tokens:
                self._next = another
                break
            batch.append(another)
        return batch


class RewardModelListener(ThreadingHTTPServer):
    """Holds what the handlers of requests need."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, address: tuple[str, int], classifier: RewardClassifier, batcher: ScoreBatcher,
        longest: int | None, key: str | None, name: str,
    ) -> None:  # fmt: skip
        super().__init__(address, ScoreRequest)
        self.classifier, self.batcher, self.longest, self.key, self.name = (
            classifier,
            batcher,
            longest,
            key,
            name,
        )

    def score_body(self, body: bytes) -> list[float]:
        """Raises BadInput for a request that cannot be scored."""
        inputs = [
            self._check_length(i, tokens) for i, tokens in enumerate(encode_body(self.classifier, body))
        ]
        self.batcher.counts.requests += 1
        scores = [future.result() for future in [self.batcher.submit_input(tokens) for tokens in inputs]]
        if not all(map(math.isfinite, scores)):
            raise ArithmeticError(f"scores must be finite, got {scores}")
        return scores

    def _check_length(self, index: int, tokens: list[int]) -> list[int]:
        if not tokens or (self.longest is not None and len(tokens) > self.longest):
            most = "" if self.longest is None else f" to {self.longest}"
            raise BadInput(f"input {index} must have 1{most} tokens, got {len(tokens)}")
        return tokens


def encode_body(classifier: RewardClassifier, body: bytes) -> list[list[int]]:
    """Returns the tokens of each input of a request's body. Raises BadInput for a body of another form."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body must be JSON: {error}") from error
    if not isinstance(request, dict) or len(request) != 1 or not request.keys() <= {"texts", "conversations"}:
        raise BadInput('the body must be {"texts": [...]} or {"conversations": [...]}')
    [(key, inputs)] = request.items()
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MAX_INPUTS:
        raise BadInput(f"{key} must be a list of 1 to {MAX_INPUTS} inputs")
    if key == "texts":
        if not all(isinstance(text, str) for text in inputs):
            raise BadInput("texts must be texts")
        return [classifier.encode_text(text) for text in inputs]
    for messages in inputs:
        is_list = isinstance(messages, list) and bool(messages)
        if not is_list or not all(map(is_message, messages)):
            raise BadInput("conversations must be lists of messages, each with a role and a content")
    return [classifier.encode_messages(messages) for messages in inputs]


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


class ScoreRequest(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: RewardModelListener

    def do_GET(self) -> None:
        if not self._check_sender():
            return
        if self.path != "/health":
            return self._send_error(404, "GET /health and POST /score are here")
        counts = self.server.batcher.counts
        self._send_json(
            200, {"model": self.server.name} | {key: getattr(counts, key) for key in counts.__slots__}
        )

    def do_POST(self) -> None:
        if not self._check_sender():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return self._send_error(411, "a request must say its Content-Length")
        if int(length[:12]) > MAX_BODY:
            return self._send_error(413, f"a body must have at most {MAX_BODY} bytes, got {length[:12]}")
        body = self.rfile.read(int(length))
        if self.path != "/score":
            return self._send_error(404, "GET /health and POST /score are here")
        try:
            self._send_json(200, {"scores": self.server.score_body(body)})
        except BadInput as error:
            self._send_error(400, str(error))
        except (RuntimeError, ArithmeticError) as error:
            print(f"a batch failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._send_error(500, f"{type(error).__name__}: {error}"[:1000])

    def _check_sender(self) -> bool:
        """True for a request with the key, where there is one; others get status 401."""
        key, given = self.server.key, self.headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            self._send_error(401, "Authorization must be Bearer and the key")
            return False
        return True

    def _send_error(self, status: int, sentence: str) -> None:
        # What follows of the request has not been read.
        self.close_connection = True
        self._send_json(status, {"error": sentence})

    def _send_json(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: there is a request for every reply."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slipstream.reward_model", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", required=True, help="folder of a sequence classifier")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0: any that is free")
    parser.add_argument(
        "--label", type=int, help="class whose probability is the score, of a model with several"
    )
    parser.add_argument("--join", default="\n\n", help="between messages where there is no chat template")
    parser.add_argument(
        "--max-tokens", type=int, help="longest input; longer ones are refused (default: the model's)"
    )
    parser.add_argument("--max-batch", type=int, default=32, help="inputs in a batch")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens in a batch, padding included")
    parser.add_argument(
        "--wait-ms", type=float, default=5.0, help="how long the first input waits for others"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU"
    )
    parser.add_argument("--key-env", help="environment variable with the key that senders must have")
    arguments = parser.parse_args()
    for name in ("max_batch", "batch_tokens", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not (math.isfinite(arguments.wait_ms) and arguments.wait_ms >= 0):
        parser.error(f"--wait-ms must be a finite number of at least 0, got {arguments.wait_ms}")
    if arguments.key_env is not None and not os.environ.get(arguments.key_env):
        parser.error(f"--key-env must name an environment variable that is set, got {arguments.key_env!r}")
    if arguments.host not in LOOPBACK and arguments.key_env is None:
        parser.error(f"--host must be one of {LOOPBACK} without --key-env, got {arguments.host!r}")
    return arguments


def make_listener(arguments: argparse.Namespace) -> RewardModelListener:
    dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    classifier = RewardClassifier(
        arguments.model, arguments.device, getattr(torch, dtype), arguments.label, arguments.join
    )
    batcher = ScoreBatcher(classifier, arguments.max_batch, arguments.batch_tokens, arguments.wait_ms / 1000)
    return RewardModelListener(
        (arguments.host, arguments.port),
        classifier,
        batcher,
        longest=arguments.max_tokens or classifier.longest,
        key=None if arguments.key_env is None else os.environ[arguments.key_env],
        name=arguments.model,
    )


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        listener = make_listener(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"the reward model cannot be served: {error}")
    host, port = listener.server_address[:2]
    print(f"The reward model {arguments.model} is served at http://{host!s}:{port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        listener.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
