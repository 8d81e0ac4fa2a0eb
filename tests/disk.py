"""A disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(left):
    """No file grows beyond `left` bytes: a write fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
