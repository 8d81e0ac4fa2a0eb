"""A full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(left):
    """Limit the size of files to `left` bytes, so that larger writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
