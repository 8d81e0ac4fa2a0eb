"""Translation of errors from libraries to a ValueError with one line that says how to fix it, and cancellation.

The generation loop passes its `cancelled` to the targets that read a text, because a pass may be long.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from huggingface_hub import constants
from safetensors import SafetensorError

from specdemo.core.safe_io import TOO_LARGE, is_out_of_memory
from specdemo.core.suggest import suggest
from specdemo.models.packaged import embedded_heads, embedded_models

CONNECTION_ERRORS = {"LocalEntryNotFoundError", "ConnectError", "ConnectionError", "TransportError", "TimeoutException"}
_cancelled: ContextVar[Callable[[], bool]] = ContextVar("cancelled", default=lambda: False)


class Cancelled(ValueError):
    """Raised by a `LoadProgress` to stop loading."""


class Unreachable(ValueError):
    """The hub does not answer."""


class WrongHistory(ValueError):
    """A model does not continue a text from specdemo's cache as transformers does."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty; without one, the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), "") or type(error).__name__


def typed_line(error: BaseException) -> str:
    """Return the type and the first line of an error, short enough for one line."""
    line = " ".join(str(error).partition("\n")[0].split()).encode("utf-8", "replace").decode()
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Translate errors of the hub's client. Raises `Unreachable` where the hub does not answer."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:  # the client raises errors of its transport, which are not OSErrors
        kinds = {kind.__name__ for kind in type(error).__mro__}
        unreachable = bool(kinds & CONNECTION_ERRORS) and not constants.HF_HUB_OFFLINE
        raise (Unreachable if unreachable else ValueError)(_explain_hub(name, error, kinds)) from error


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Translate errors from loading a model with transformers."""
    try:
        yield
    except Exception as error:
        raise ValueError(_explain_load(name, error)) from error


@contextmanager
def checkpoint_errors(name: str) -> Iterator[None]:
    """Translate errors from reading a head's files. A ValueError keeps its message."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ValueError(f"{name} {TOO_LARGE}") from error
        line = first_line(error)
        has_message = isinstance(error, ValueError)
        raise ValueError(line if has_message else f"{name} cannot be read ({line}); fetch it again") from error


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Translate a panic of the tokenizers library, which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} fails: {first_line(error)[:200]}; choose another model") from None


def _explain_hub(name: str, error: Exception, kinds: set[str]) -> str:
    repository, _, revision = name.partition("@")
    near = suggest(name, embedded_models(), embedded_heads())
    hint = near if near.startswith("did") else "name a file, a folder or a model that was downloaded"
    if "GatedRepoError" in kinds:
        return (
            f"{repository} is gated; accept its licence on huggingface.co/{repository} and log in with: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repository} has no revision {revision!r}; use a branch, a tag or a commit, or omit @{revision}"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"unknown model {name!r}; {near}, or give a folder or a Hugging Face id (hf auth login for private ones)"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} and constants.HF_HUB_OFFLINE:
        return f"{name!r} is not on this machine and HF_HUB_OFFLINE is set; unset it, or {hint}"
    if kinds & CONNECTION_ERRORS:
        return f"{name!r} is not on this machine and {constants.ENDPOINT} cannot be reached; {hint}"
    line = first_line(error)
    if "HfHubHTTPError" in kinds:
        return f"{constants.ENDPOINT} rejected the download of {name!r} ({line}); try again later"
    if "Consistency check failed" in line:
        return f"a file of {name} is incomplete; run the command again, which downloads only missing files"
    return f"{name} cannot be downloaded: {line}"


def _explain_load(name: str, error: Exception) -> str:
    line = first_line(error)
    if is_out_of_memory(error):
        return f"{name} {TOO_LARGE}"
    if "trust_remote_code" in str(error):
        return f"{name} needs code from its repository, which specdemo never runs; choose a model type of transformers"
    if isinstance(error, SafetensorError):
        return f"a file of {name} is damaged or cut short ({line}); delete it and fetch it again"
    return line if line.startswith(name) else f"{name} cannot be loaded: {line}"


@contextmanager
def cancellation(cancelled: Callable[[], bool]) -> Iterator[None]:
    """Let passes inside the block raise `Cancelled` soon after `cancelled()` is true."""
    token = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(token)


def pass_cancelled() -> Callable[[], bool]:
    """Return the function that reports, in any thread, whether to stop the current pass."""
    return _cancelled.get()
