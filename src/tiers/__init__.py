"""Storage tiers: where blocks of a key/value cache live, and who may use them."""
