"""The memory of a card, worked out without one: what torch's allocator would hold, and when."""
