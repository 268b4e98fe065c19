"""Sizes of the golden models whose delta nets keep state in slots."""

# Sizes in bytes in a golden model: of a page for its two layers with attention, and of a slot for its three delta nets.
PAGE_BYTES = 2 * 2 * 2 * 32 * 16 * 4
SLOT_BYTES = 3 * 4 * (2 * 2 * 16 * 3 + 4 * 24 * 3 + 4 * 16 * 24)
