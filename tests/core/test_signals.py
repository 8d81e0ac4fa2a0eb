import signal
import threading

import pytest

from specdemo.core.signals import defer_signals, sigterm_as_exit


@pytest.fixture(autouse=True)
def handlers():
    """Check that the signal handlers after a test are those from before it."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_exits_like_an_exception():
    closed = []
    with pytest.raises(SystemExit) as left, sigterm_as_exit():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)
    assert left.value.code == 143 and closed


def test_ctrl_c_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals() as noted:
        signal.raise_signal(signal.SIGINT)
        done.append(list(noted))
    assert done == [[signal.SIGINT]]


def test_sigterm_waits_too():
    with pytest.raises(SystemExit) as left, sigterm_as_exit(), defer_signals() as noted:
        signal.raise_signal(signal.SIGTERM)
        assert noted
    assert left.value.code == 143


def test_the_second_ctrl_c_ends_it_at_once():
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_error_during_deferral_is_raised_instead():
    with pytest.raises(ValueError, match="full"), defer_signals():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("full")


def test_an_ignored_signal_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_signals() as noted:
            signal.raise_signal(signal.SIGINT)
        assert not noted
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_changes_no_handlers():
    found = []

    def work():
        with sigterm_as_exit(), defer_signals() as noted:
            found.append(noted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
