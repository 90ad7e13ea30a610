"""A kernel that does nothing. To compile it wakes the compiler, see ``launch.wake_compiler``."""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

import triton


@triton.jit
def nothing():
    pass
