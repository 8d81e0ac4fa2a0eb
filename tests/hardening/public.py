"""Clients of a page that need no browser."""

import json
import secrets
from contextlib import contextmanager

import httpx


@contextmanager
def visitors(page):
    """Yield a function that opens the page as a new visitor. All get the page's configuration, read once."""
    config, opened = httpx.get(f"{page}config", timeout=300.0).json(), []

    def visit(address=None):
        opened.append(Caller(page, config, address))
        return opened[-1]

    yield visit
    for caller in opened:
        caller.client.close()


class Caller:
    """A visitor with its own session. address: its address in X-Forwarded-For."""

    def __init__(self, page, config, address=None):
        headers = {"X-Forwarded-For": address} if address else {}
        self.client = httpx.Client(base_url=page, headers=headers, timeout=300.0)
        self.config = config
        self.session = secrets.token_hex(6)

    def fn(self, event, elem_id=None):
        """Return the last event of a control that the server handles, or an endpoint by its name."""
        ids = {c["id"] for c in self.config["components"] if elem_id and c["props"].get("elem_id") == elem_id}
        found = [
            fn
            for fn in reversed(self.config["dependencies"])
            if (
                fn["api_name"] == event
                if elem_id is None
                else any(t[0] in ids and t[1] == event for t in fn["targets"])
            )
        ]
        handled = [fn for fn in found if fn["backend_fn"]]
        return handled[0] if handled else self.after(found[0])  # Run waits for a script

    def after(self, fn):
        """Return the event that is triggered after another and uses the engine."""
        return next(f for f in self.config["dependencies"] if f["trigger_after"] == fn["id"])

    def values(self, fn, **changed):
        """Return the page's default inputs of an event, with changes by elem_id."""
        controls = {c["id"]: c["props"] for c in self.config["components"]}
        return [changed.get(controls[i].get("elem_id"), controls[i].get("value")) for i in fn["inputs"]]

    def join(self, fn, data):
        body = {"fn_index": fn["id"], "data": data, "session_hash": self.session}
        return self.client.post("gradio_api/queue/join", json=body)

    def messages(self):
        """Yield the queue's messages to this session until it has no call left."""
        with self.client.stream("GET", "gradio_api/queue/data", params={"session_hash": self.session}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line[5:])

    def press(self, elem_id, seen=lambda message: None, **changed):
        """Press a button that starts a job, and return the messages of the call that follows it."""
        self.join_queue(elem_id, **changed)
        return [message for message in self.messages() if not seen(message)]

    def join_queue(self, elem_id, **changed):
        """Press a button that starts a job, whose call then waits in the queue."""
        pressed = self.fn("click", elem_id)
        self.now(pressed, self.values(pressed, **changed)).raise_for_status()
        self.join(self.after(pressed), []).raise_for_status()

    def call(self, fn, data):
        """Make one call and return its messages."""
        self.join(fn, data).raise_for_status()
        return list(self.messages())

    def now(self, fn, data):
        """Make a call that bypasses the queue."""
        body = {"fn_index": fn["id"], "data": data, "session_hash": self.session}
        return self.client.post("gradio_api/run/predict", json=body)

    def upload(self, name, content):
        path = self.client.post("gradio_api/upload", files={"files": (name, content, "application/json")}).json()[0]
        return {"path": path, "orig_name": name, "meta": {"_type": "gradio.FileData"}}
