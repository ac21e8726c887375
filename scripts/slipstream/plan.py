"""Says on paper what memory a run needs, without loading anything, and refuses a layout that cannot fit.

    scripts/launch.sh --plan model.path=FOLDER-OR-CONFIG [key=value ...]
    scripts/launch.sh --plan model.path=models/Qwen3-8B model.dtype=bfloat16 --gpus 8 --gpu-memory 80

The keys are a run's own. Of a folder only `config.json` is read; the file alone will do. The exit status is 0
for a layout that fits, 1 for one that does not (with the nearest one that does), 2 for a key or a model that
cannot be planned.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.load import find_resumed_folder, load_config, load_resumed_config
from configs.placement import PlacementMode
from configs.schema import Config
from configs.sizes import count_sizes, find_config_file, read_model_config
from slipstream.continuation import AlreadyFinished, continue_run
from slipstream.plan_hardware import add_arguments, read_hardware, read_rates
from slipstream.plan_layout import PlannedModel, plan_run
from slipstream.plan_report import print_plan, print_proposal
from slipstream.stop_signals import KILLED

FLAG = "--plan"


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    told = parser.parse_intermixed_args([argument for argument in arguments if argument != FLAG])
    try:
        config = load_planned_config(told.overrides)
        model = read_model(config)
        if told.hosts > 1 and config.placement.mode is PlacementMode.colocated:
            raise ValueError(
                "--hosts must be 1 with placement.mode=colocated (learner and engines are on one host), "
                f"got {told.hosts}"
            )
    except AlreadyFinished as finished:
        print(finished)
        return 0
    except (ValueError, OSError) as error:
        print(f"No plan can be made:\n{error}", file=sys.stderr)
        return 2
    hardware = read_hardware(told)
    plan = plan_run(config, model, hardware)
    try:
        print_plan(config, model, plan, read_rates(told))
        if not plan.fits:
            sys.stdout.flush()
            print_proposal(config, model, hardware)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return KILLED
    except BrokenPipeError:
        # A reader has left early, such as `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if plan.fits else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/launch.sh --plan",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="docs/big-models.md has an example and says what is counted.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a run's keys; model.path is needed"
    )
    add_arguments(parser)
    return parser


def load_planned_config(overrides: list[str]) -> Config:
    """Loads the configuration of a run, or of one that is resumed. Raises ValueError, and AlreadyFinished."""
    overrides = continue_run(overrides)
    resumed = find_resumed_folder(overrides)
    config = load_config(overrides) if resumed is None else load_resumed_config(resumed, overrides)
    if config.learner.engine is LearnerKind.simulated or config.generators.engine is EngineKind.simulated:
        raise ValueError("learner.engine must be fsdp or megatron to be planned, got simulated")
    return config


def read_model(config: Config) -> PlannedModel:
    """Reads the model's configuration. Raises ValueError for a path without one, and for a kind of model that
    is not known."""
    file = find_config_file(Path(config.model.path))
    if not file.is_file():
        raise ValueError(
            "model.path must be a Hugging Face folder or a config.json for a plan, "
            f"got {config.model.path}{explain_path(config.model.path)}"
        )
    hf = read_model_config(file)
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    return PlannedModel(name, hf, count_sizes(hf))


def explain_path(path: str) -> str:
    """Returns where a configuration comes from, for what looks like a name on the hub."""
    if path == "tiny" or path.count("/") != 1 or Path(path).parent.exists():
        return ""
    owner, _, name = path.partition("/")
    # A recipe's file names the owner of its model.
    wanted = f"OWNER/{name}" if owner == "models" else path
    return f" (`hf download {wanted} config.json --local-dir models/{name}` brings one from the hub)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
