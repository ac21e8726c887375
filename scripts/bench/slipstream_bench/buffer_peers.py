"""What else could carry groups, for `benchmark_buffer.py`: each takes a group's bytes and its shape
(samples, tokens of each)."""

import os
import sys
import time
from typing import Any

from buffers.trajectory import decode_batch


def ray_queue(data: bytes, shape: tuple[int, int], seconds: float) -> float:
    """A queue actor that carries references to objects in Ray's store; batches of 16, two producers."""
    import ray
    from ray.util.queue import Queue

    queue = Queue(maxsize=256)

    @ray.remote(num_cpus=0)
    def put() -> None:
        while True:
            queue.put_nowait_batch([ray.put(data) for _ in range(16)]) if queue.qsize() < 200 else time.sleep(
                0.001
            )

    @ray.remote(num_cpus=0)
    def get() -> float:
        began, num = 0.0, 0
        while not began or time.perf_counter() - began < seconds:
            references = queue.get_nowait_batch(min(16, queue.qsize()))
            for data in ray.get(references):
                decode_batch(data).column("tokens").flatten().to_numpy().sum()
            num += len(references) if began else 0
            began = began or (time.perf_counter() if references else 0.0)
        return num / seconds

    working = [put.remote() for _ in range(2)]
    rate = ray.get(get.remote())
    for reference in working:
        ray.cancel(reference, force=True)
    queue.shutdown(force=True)
    return rate


def transfer_queue(data: bytes, shape: tuple[int, int], seconds: float) -> float:
    """Puts groups of 8 samples by key, two producers at once, and gets them by key in a third process; 4
    groups a call."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    tq.init()
    per_call = 4
    whole = (shape[0] * per_call, shape[1])

    class Producer:
        def __init__(self, number: int) -> None:
            tq.init()
            fields = {
                "tokens": torch.int32,
                "logprobs": torch.float32,
                "versions": torch.int32,
                "sampled": torch.bool,
            }
            self._data = TensorDict(
                {name: torch.ones(whole, dtype=kind) for name, kind in fields.items()}, whole[0]
            )
            self._number = number

        def put(self, call: int) -> list[str]:
            keys = [f"{self._number}-{call}-{i}" for i in range(whole[0])]
            tq.kv_batch_put(keys=keys, partition_id="train", fields=self._data)
            return keys

    class Consumer:
        def __init__(self) -> None:
            tq.init()

        def get(self, keys: list[str]) -> int:
            data = tq.kv_batch_get(keys=keys, partition_id="train")
            total = sum(int(row.sum()) for row in data["tokens"])
            tq.kv_clear(keys=keys, partition_id="train")
            return total

    remote: Any = ray.remote(num_cpus=0)
    producers, consumer = [remote(Producer).remote(number) for number in range(2)], remote(Consumer).remote()
    ray.get(
        [consumer.get.remote(keys) for keys in ray.get([producer.put.remote(-1) for producer in producers])]
    )
    began, num, call = time.perf_counter(), 0, 0
    puts = {producer.put.remote(call): producer for producer in producers}
    gets: list[Any] = []
    while time.perf_counter() - began < seconds:
        done, _ = ray.wait([*puts, *gets], num_returns=1)
        for reference in done:
            if reference in puts:
                producer = puts.pop(reference)
                gets.append(consumer.get.remote(reference))
                call += 1
                if len(gets) < 8:
                    puts[producer.put.remote(call)] = producer
            else:
                gets.remove(reference)
                num += per_call
                for producer in producers:
                    if producer not in puts.values():
                        call += 1
                        puts[producer.put.remote(call)] = producer
    rate = num / (time.perf_counter() - began)
    tq.close()
    return rate


PEERS = {"Ray queue actor": ray_queue, "TransferQueue": transfer_queue}


def measure_peer(name: str, data: bytes, shape: tuple[int, int], seconds: float) -> float | str:
    """Groups a second, or why there is no figure."""
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # those who wait when the queue is closed
    try:
        import ray

        ray.init(
            num_cpus=4,
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        return PEERS[name](data, shape, seconds)
    except ImportError as error:
        return f"not installed ({error.name})"
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
