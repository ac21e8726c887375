"""A tokenizer of bytes, made in a moment: each byte is a token, and `<|end|>` ends a sequence."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate([END, *alphabet])}, merges=[])
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
