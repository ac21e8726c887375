"""Other systems that could carry groups, measured for `benchmark_buffer.py`.

Each measurement takes the bytes of a group, its shape (samples, tokens of each sample) and the seconds to run
for, and returns groups a second.
"""

import os
import sys
import time
from typing import Any

from buffers.trajectory import decode_batch


def measure_ray_queue(data: bytes, shape: tuple[int, int], seconds: float) -> float:
    """Measures a queue actor that carries references to objects in Ray's store; batches of 16, two
    producers."""
    import ray
    from ray.util.queue import Queue

    queue = Queue(maxsize=256)

    @ray.remote(num_cpus=0)
    def put_groups() -> None:
        while True:
            if queue.qsize() < 200:
                queue.put_nowait_batch([ray.put(data) for _ in range(16)])
            else:
                time.sleep(0.001)

    @ray.remote(num_cpus=0)
    def get_groups() -> float:
        began, num = 0.0, 0
        while not began or time.perf_counter() - began < seconds:
            references = queue.get_nowait_batch(min(16, queue.qsize()))
            for data in ray.get(references):
                decode_batch(data).column("tokens").flatten().to_numpy().sum()
            num += len(references) if began else 0
            began = began or (time.perf_counter() if references else 0.0)
        return num / seconds

    working = [put_groups.remote() for _ in range(2)]
    rate = ray.get(get_groups.remote())
    for reference in working:
        ray.cancel(reference, force=True)
    queue.shutdown(force=True)
    return rate


def make_transfer_queue_peers(shape: tuple[int, int]) -> tuple[list[Any], Any]:
    """Starts two producers, which put batches of this shape (rows, tokens of each), and one consumer."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    class QueueProducer:
        def __init__(self, number: int) -> None:
            tq.init()
            fields = {
                "tokens": torch.int32,
                "logprobs": torch.float32,
                "versions": torch.int32,
                "sampled": torch.bool,
            }
            self._data = TensorDict(
                {name: torch.ones(shape, dtype=kind) for name, kind in fields.items()}, shape[0]
            )
            self._number = number

        def put_groups(self, call: int) -> list[str]:
            keys = [f"{self._number}-{call}-{i}" for i in range(shape[0])]
            tq.kv_batch_put(keys=keys, partition_id="train", fields=self._data)
            return keys

    class QueueConsumer:
        def __init__(self) -> None:
            tq.init()

        def get_groups(self, keys: list[str]) -> int:
            data = tq.kv_batch_get(keys=keys, partition_id="train")
            total = sum(int(row.sum()) for row in data["tokens"])
            tq.kv_clear(keys=keys, partition_id="train")
            return total

    remote: Any = ray.remote(num_cpus=0)
    return [remote(QueueProducer).remote(number) for number in range(2)], remote(QueueConsumer).remote()


def measure_transfer_queue(data: bytes, shape: tuple[int, int], seconds: float) -> float:
    """Measures TransferQueue: two producers at once put groups of 8 samples by key, 4 groups a call.

    A third process gets them by key.
    """
    import ray
    import transfer_queue as tq

    tq.init()
    per_call = 4
    producers, consumer = make_transfer_queue_peers((shape[0] * per_call, shape[1]))
    # The first batches, which warm up both sides, are not counted.
    ray.get(
        [
            consumer.get_groups.remote(keys)
            for keys in ray.get([producer.put_groups.remote(-1) for producer in producers])
        ]
    )
    began, num, call = time.perf_counter(), 0, 0
    puts = {producer.put_groups.remote(call): producer for producer in producers}
    gets: list[Any] = []
    while time.perf_counter() - began < seconds:
        done, _ = ray.wait([*puts, *gets], num_returns=1)
        for reference in done:
            if reference in puts:
                producer = puts.pop(reference)
                gets.append(consumer.get_groups.remote(reference))
                call += 1
                if len(gets) < 8:
                    puts[producer.put_groups.remote(call)] = producer
            else:
                gets.remove(reference)
                num += per_call
                for producer in producers:
                    if producer not in puts.values():
                        call += 1
                        puts[producer.put_groups.remote(call)] = producer
    rate = num / (time.perf_counter() - began)
    tq.close()
    return rate


PEERS = {"Ray queue actor": measure_ray_queue, "TransferQueue": measure_transfer_queue}


def measure_peer(name: str, data: bytes, shape: tuple[int, int], seconds: float) -> float | str:
    """Returns groups a second, or the reason why there is no figure."""
    # Processes that still wait when the queue is closed raise errors, which mean nothing.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
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
