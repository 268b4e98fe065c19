"""Sizes of the golden models whose delta nets keep state in slots."""

# Bytes of a golden model: a page of its two layers with attention, and a slot of its three delta nets.
PAGE_BYTES = 2 * 2 * 2 * 32 * 16 * 4
SLOT_BYTES = 3 * 4 * (2 * 2 * 16 * 3 + 4 * 24 * 3 + 4 * 16 * 24)
