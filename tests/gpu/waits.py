"""Synchronisations of the host with the device, turned into errors."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation():
    """Raise RuntimeError at every wait of the host for the device, and restore torch's mode at the end.

    torch warns once, after setting the mode, that this mode is a prototype.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
