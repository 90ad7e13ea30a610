"""The memory of a GPU, worked out without one: what torch's allocator would hold, and when."""
