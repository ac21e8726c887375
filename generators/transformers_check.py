"""Compares samples of transformers' continuous batching with the model's own forward pass.

Not every model of transformers asks for keys and values where continuous batching keeps them: some compute
attention in a way of their own. Their samples see other requests, or too little, and no error is raised.
"""

from typing import Any

import torch

from generators.engine import Completion, Engine, Sample

TOLERANCE = {torch.float32: 1e-4}
"""Largest mean of |log-probability of the engine − log-probability of the forward pass| at temperature 1.
Rounding makes 1e-6, and whatever is wrong 0.1 and more."""
TOLERANCE_OF_16_BITS = 0.1
LENGTHS = (96, 33)
"""Tokens of the two sequences, at most."""


@torch.no_grad()
def check_numbers(engine: Engine, model: Any, max_model_len: int, temperature: float) -> None:
    """Samples two sequences side by side, and computes each again by itself with eager attention.

    The engine must hold a version, and no sample. Raises ValueError for a model that fails, or whose numbers
    differ.
    """
    served, vocabulary = model.config._attn_implementation, model.config.get_text_config().vocab_size
    random = torch.Generator().manual_seed(0)
    lengths = [min(max_model_len, length) for length in LENGTHS]
    prompts = [torch.randint(vocabulary, (n - max(1, n // 3),), generator=random).tolist() for n in lengths]
    done: dict[int, Completion] = {}
    differences = []
    try:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            count = length - len(prompt)
            engine.add_sample(
                Sample(id=str(number), prompt=prompt, max_tokens=count, seed=number, forced=True)
            )
        while engine.num_unfinished:
            done |= {int(completion.id): completion for completion in engine.step()}
        model.set_attn_implementation("eager")
        for number, prompt in enumerate(prompts):
            tokens = torch.tensor(done[number].tokens, device=model.device)
            whole = torch.cat([torch.tensor(prompt, device=model.device), tokens])
            logits = model(whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu()
            differences.append((expected - torch.tensor(done[number].logprobs)).abs())
    except Exception as error:
        raise _make_refusal(model, f"{type(error).__name__}: {error}") from error
    model.set_attn_implementation(served)
    mean = float(torch.cat(differences).nan_to_num(nan=torch.inf).mean())
    if not mean <= TOLERANCE.get(model.dtype, TOLERANCE_OF_16_BITS) / min(1.0, temperature):
        raise _make_refusal(model, f"log-probabilities {mean:.2g} from those of its own forward pass")


def _make_refusal(model: Any, why: str) -> ValueError:
    return ValueError(
        "generators.engine must be vllm for this model.path (transformers' continuous batching cannot serve "
        f"it), got {model.config.model_type}: {why}"
    )
