"""Requests of production to two servers, on stand-ins that behave like reported bugs."""

import json

import pytest

from specdemo.__main__ import main
from specdemo.bench.server_requests import IDENTICAL, KINDS, REFUSED, SAMPLES, UNEXPLAINED, UNSTABLE, Reply, judge
from specdemo.servers import address
from tests.completion_server import completion_server, piece, record_pauses


@pytest.fixture(autouse=True)
def unlisted(monkeypatch):
    record_pauses(monkeypatch)
    monkeypatch.setenv(address.LISTED, "")


def chat_server(spoil=lambda kind, delta, body: delta, refusal=lambda path, body: (200, None)):
    """Return a deterministic server of chats. spoil: changes the message of a kind of request."""

    def pieces(body):
        if "prompt" in body:
            return [piece("a", total=1), piece("b", total=2, finish="length")]
        kind, delta = "concurrent", {"content": "text of " + body["messages"][0]["content"][:20]}
        if "tools" in body:
            call = {"index": 0, "function": {"name": "forecast", "arguments": '{"city": "Bergen", "days": 3}'}}
            kind, delta = "tools", {"tool_calls": [call]}
        elif "response_format" in body:
            kind, delta = "json", {"content": '{"city": "Lima", "days": 2}'}
        elif "chat_template_kwargs" in body:
            kind, delta = "thinking", {"content": "no", "reasoning_content": "17 * 23"}
        elif body["temperature"]:
            kind, delta = "sampled", {"content": "cat" if body["seed"] % 2 else "dog"}
        delta = spoil(kind, delta, body)
        return [{"choices": [{"delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]

    return completion_server(pieces, refusal=refusal)


def checked(capsys, plain, server, requests):
    given = [plain.address, server.address, "--prompts", "1", "--new-tokens", "2", "--requests", requests]
    code = main(["check-server", *given, "--json"])
    result = json.loads(capsys.readouterr().out)
    return (
        code,
        {row["prompt"].partition(":")[0]: row["output"] for row in reversed(result["rows"][1:])},
        result["remarks"],
    )


def test_servers_that_agree_pass_in_every_kind(capsys):
    with chat_server() as plain, chat_server() as server:
        code, outputs, remarks = checked(capsys, plain, server, "all")
        assert code == 0 and outputs == dict.fromkeys(KINDS, IDENTICAL)
        assert remarks[-1].startswith("No difference found in 20 further requests to 127.0.0.1:")
        sent = [body for path, body, _ in server.requests if path == "/v1/chat/completions" and "seed" in body]
        assert [body["seed"] for body in sent].count(0) == 3 and len(sent) == SAMPLES + 2
        assert all(body["model"] == "m" for body in sent)


def spoiled_arguments(kind, delta, body):
    delta["tool_calls"][0]["function"]["arguments"] = '{"city": "Bergen", "days": 3}}'
    return delta


@pytest.mark.parametrize(
    ("kind", "change", "output"),
    [
        ("tools", spoiled_arguments, """arguments that are no JSON: '{"city": "Bergen", "days": 3}}'"""),  # vLLM 46118
        ("tools", lambda *_: {"content": "It rains."}, UNEXPLAINED),  # the call is lost
        (
            "json",
            lambda *_: {"content": '{"city": "Lima", "days"'},
            """text that is no JSON: '{"city": "Lima", "days"'""",
        ),
        ("concurrent", lambda *_: {"content": "of another request"}, UNEXPLAINED),
        ("thinking", lambda *_: {"content": "17 * 23 no"}, UNEXPLAINED),  # the thinking is in the answer
        ("sampled", lambda *_: {"content": "dog"}, "another distribution"),
    ],
)
def test_what_breaks_is_named_with_the_request_to_attach(capsys, kind, change, output):
    def spoil(of, delta, body):
        return change(of, delta, body) if of == kind else delta

    with chat_server() as plain, chat_server(spoil) as server:
        code, outputs, remarks = checked(capsys, plain, server, kind)
    assert (code, outputs) == (1, {kind: output})
    assert f"further requests to {server.address.removeprefix('http://')} differ from" in remarks[-2]
    assert remarks[-1].startswith(f"To report the difference of {kind}, attach: curl {server.address}/v1/chat")


def test_a_seed_that_gives_two_texts_is_found(capsys):
    seen = []

    def spoil(kind, delta, body):
        seen.append(body.get("seed"))
        return {"content": "cat"} if kind == "sampled" and seen.count(0) == 3 else delta

    with chat_server() as plain, chat_server(spoil) as server:
        code, _, remarks = checked(capsys, plain, server, "sampled")
    assert code == 1 and "1 of 2 further requests" in remarks[-2]


def test_what_neither_server_takes_is_no_difference(capsys):
    def refusal(path, body):
        return (400, {"error": "no tools"}) if "tools" in body else (200, None)

    with chat_server(refusal=refusal) as plain, chat_server(refusal=refusal) as server, chat_server() as able:
        assert checked(capsys, plain, server, "tools")[:2] == (0, {"tools": REFUSED})
        code, outputs, _ = checked(capsys, able, server, "tools")
        assert code == 1 and outputs["tools"].startswith("refused: Error code: 400")


@pytest.mark.parametrize(
    ("reference", "again", "reply", "output"),
    [
        (Reply("a", silence_s=0.5), None, Reply("a", silence_s=3.1), "silent for 3.1 s"),  # vLLM 49002
        (Reply("a", silence_s=1.0), None, Reply("a", silence_s=3.9), IDENTICAL),  # not much longer than the reference
        (Reply("a b", finish="stop"), None, Reply("a", finish="length"), "cut"),
        (Reply("a b", finish="stop"), None, Reply("a"), "cut"),  # the stream ended
        (Reply("a", finish="stop"), Reply("b", finish="stop"), Reply("c", finish="stop"), UNSTABLE),
        (Reply("a", finish="stop"), Reply("b", finish="stop"), Reply("b", finish="stop"), IDENTICAL),
    ],
)
def test_replies_are_judged(reference, again, reply, output):
    assert judge(reference, again or reference, reply, lambda reply: "") == output


def test_bad_input_is_one_line(capsys):
    assert main(["check-server", "http://a:1", "http://a:1", "--requests", "tool"]) == 2
    assert capsys.readouterr().err == "specdemo: unknown kind of request 'tool'; did you mean 'tools'?\n"
    with chat_server() as plain, chat_server(lambda *_: 7) as server:
        given = [plain.address, server.address, "--prompts", "1", "--new-tokens", "2", "--requests", "tools"]
        assert main(["check-server", *given]) == 2
    assert "specdemo: a server sent what is no chat: " in capsys.readouterr().err
