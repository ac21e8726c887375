"""The tiny model of the tests: made once from the sorting task's solved examples, then kept in the cache.

python -m tests.tiny_models      makes it, from the folder above, beside tests that do not need it
"""

from pathlib import Path


def find_tiny_model() -> Path:
    """Returns the folder of the tiny model; makes the model (half a minute) if the cache lacks it."""
    from generators.tasks.sorting import Task
    from learners.tiny_cache import prepare_tiny_model

    return prepare_tiny_model(Task().solved_examples("train", seed=0))


if __name__ == "__main__":
    find_tiny_model()
