"""Key heads in attention over tokens that several ranks share: each rank computes some heads of all tokens.

This file does not need torch.
"""


def count_exchanged_heads(num_heads: int, num_key_heads: int, ranks: int) -> int:
    """Returns how many key heads the ranks exchange.

    Each must get whole ones, so key heads are repeated where the ranks do not divide their number.
    """
    if num_key_heads % ranks == 0:
        return num_key_heads
    return ranks if ranks % num_key_heads == 0 else num_heads


def count_repeated_elements(num_heads: int, num_key_heads: int, head_dim: int, ranks: int) -> int:
    """Returns the elements of a token's keys and values in one layer that exist only because heads are
    repeated, and that are kept for the backward pass."""
    return 2 * head_dim * (count_exchanged_heads(num_heads, num_key_heads, ranks) - num_key_heads)
