"""Synchronisations of the host with the device, as errors."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation():
    """Raise RuntimeError at every wait of the host for the device; restore torch's mode in every case.

    torch warns once that this mode is a prototype. It does so after it has set the mode.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
