"""Losslessness of servers, on scripted servers and on the local engine."""

import json
from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest

from specdemo.__main__ import main
from specdemo.bench.check_server import (
    BUILT_IN_PROMPTS,
    DIFFERS,
    IDENTICAL,
    MOST,
    TIE,
    UNEXPLAINED,
    GreedyAnswer,
    LocalSide,
    ServerCheck,
    after,
    common_pieces,
    margin_between,
    share_interval,
    without_identical,
)
from specdemo.bench.prompts import openings
from specdemo.bench.result import Result
from specdemo.servers import address
from specdemo.servers.stream import StreamParser
from tests.completion_server import completion_server, piece, record_pauses

LENGTH = 200


@pytest.fixture(autouse=True)
def unlisted(monkeypatch):
    record_pauses(monkeypatch)
    monkeypatch.setenv(address.LISTED, "")


def answering(changed=None, second=-4.0, logprobs="completion", chat=False, texts=BUILT_IN_PROMPTS):
    """Return a deterministic language model. changed: (prompt, position) of a token that it replaces; second: the
    log-probability of the replacement; chat: it takes messages only.
    """

    def word(prompt, at):
        return " other" if (prompt, at) == changed else f" w{prompt}.{at}"

    def pieces(body):
        given = body["messages"][0]["content"] if chat else body["prompt"]
        prompt = next(i for i, text in enumerate(texts) if given.startswith(text))
        start = given.count(" w" + str(prompt) + ".")
        end = min(start + body["max_tokens"], LENGTH)
        found = [piece(word(prompt, at), total=at - start + 1) for at in range(start, end)]
        found[-1]["choices"][0]["finish_reason"] = "length"
        for at, one in enumerate(found if "logprobs" in body else [], start):
            top = {word(prompt, at): -0.01, " other": second, " third": -inf}
            content = [{"token": token, "logprob": value} for token, value in top.items() if value > -inf]
            one["choices"][0]["logprobs"] = {
                "completion": {"tokens": [], "top_logprobs": [top]},
                "chat": {"content": [{"token": word(prompt, at), "top_logprobs": content}]},
            }.get(logprobs)
        return found

    def refusal(path, body):
        return (404, {}) if chat and path == "/v1/completions" else (200, None)

    return completion_server(pieces, refusal=refusal)


def checked(capsys, *arguments):
    code = main(["check-server", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("logprobs", ["completion", "chat"])
def test_one_changed_token_in_an_answer_of_200_is_found(capsys, logprobs):
    with answering(logprobs=logprobs) as plain, answering(changed=(3, 137)) as wrong:
        code, result = checked(capsys, plain.address, wrong.address, "--prompts", "5", "--new-tokens", "200")
    assert code == 1 and [row["output"] for row in result["rows"]] == [*[IDENTICAL] * 3, DIFFERS, IDENTICAL]
    row = result["rows"][3]
    assert (row["parts at"], row["margin"]) == (137, 3.99)
    assert row["reference"].startswith(" w3.137") and row["server"].startswith(" other")
    assert result["remarks"][0].startswith("Not lossless: in 1 of 5 prompts 127.0.0.1:")
    assert "its margin is 3.99 nats" in result["remarks"][0]
    assert "95 % interval of the share: 1 to 72 %" in result["remarks"][0]


def test_a_long_table_lists_the_differences():
    rows = [{"prompt": str(n), "output": DIFFERS if n == 7 else IDENTICAL} for n in range(31)]
    result = Result("check-server", 1, {}, {}, rows, ["verdict"])
    assert without_identical(result).rows == rows[7:8] and without_identical(result).remarks == ["verdict"]
    assert without_identical(replace(result, rows=rows[:30])).rows == rows[:30]
    assert without_identical(replace(result, rows=rows[8:] * 2)).rows == rows[8:9]


def test_a_server_of_chats_reports_the_margin_in_its_own_answer(capsys):
    with answering(logprobs="chat", chat=True) as plain, answering(changed=(1, 137), chat=True) as wrong:
        code, result = checked(capsys, plain.address, wrong.address, "--prompts", "2", "--new-tokens", "200")
        assert (code, result["rows"][1]["parts at"], result["rows"][1]["margin"]) == (1, 137, 3.99)
        *_, (path, body, _) = plain.requests
        assert (path, body["logprobs"], body["top_logprobs"]) == ("/v1/chat/completions", True, 5)
    with answering(logprobs="", chat=True) as silent, answering(changed=(0, 0), chat=True) as wrong:
        assert checked(capsys, silent.address, wrong.address, "--prompts", "1")[1]["rows"][0]["output"] == UNEXPLAINED


@pytest.mark.parametrize(
    "logprobs",
    [7, {"content": 7}, {"content": [{"token": 7}]}, {"content": [{"top_logprobs": [{"token": "a", "logprob": 9.0}]}]}],
)
def test_invalid_log_probabilities_are_unknown(logprobs):
    parser = StreamParser(lambda piece: None, 4)
    for _ in range(4):
        parser.feed({"choices": [{"delta": {"content": "a"}, "logprobs": logprobs}]}, 0.0)
    assert parser.alternatives == [] and parser.next_tokens == {} and parser.pieces == 4


@pytest.mark.parametrize(
    ("text", "found"), [("", {"a": -1.0}), ("ab", {"c": -2.0}), ("a", {}), ("abcd", {}), ("ac", {})]
)
def test_alternatives_after_a_text(text, found):
    assert after(text, [("ab", {"a": -1.0}), ("c", {"c": -2.0})]) == found


def test_prompts_of_a_file(capsys, tmp_path):
    lines, questions = tmp_path / "prompts.txt", tmp_path / "question.jsonl"
    lines.write_text("".join(f"Question {n}?\n\n" for n in range(30)), encoding="utf-8")
    asked = [{"question_id": n, "category": "all", "turns": [f"Question {n}?"]} for n in range(30)]
    questions.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    for file in (lines, questions):
        with answering(texts=[f"Question {n}?" for n in range(30)]) as plain:
            options = (plain.address, plain.address, "--prompt-file", str(file), "--new-tokens", "2")
            code, result = checked(capsys, *options)
            assert code == 0 and [row["prompt"] for row in result["rows"]] == [f"Question {n}?" for n in range(30)]
            assert len(checked(capsys, *options, "--prompts", "3")[1]["rows"]) == 3
            assert result["config"]["prompt_file"] == file.name
    command = ["check-server", "http://a:1", "http://a:1", "--prompt-file"]
    assert main([*command, str(lines), "--prompts", "31"]) == 2
    assert "has 30 prompts, not 31; lower --prompts" in capsys.readouterr().err
    lines.write_text("\n", encoding="utf-8")
    assert main([*command, str(lines)]) == 2
    assert "contains no prompts; write one per line" in capsys.readouterr().err


def test_openings_differ():
    assert len(set(openings(MOST))) == MOST and openings(0) == openings(-5) == []


def test_a_near_tie_passes_and_an_unknown_margin_does_not(capsys):
    with answering(changed=(0, 5)) as wrong:
        with answering(second=-0.2) as plain:
            code, result = checked(capsys, plain.address, wrong.address, "--prompts", "2")
            assert (code, result["rows"][0]["output"]) == (0, TIE)
            assert "1 of 2 texts are identical; 1 part at near-ties of at most 0.190 nats" in result["remarks"][0]
            assert checked(capsys, plain.address, wrong.address, "--prompts", "2", "--margin", "0.1")[0] == 1
        with answering(logprobs="") as silent:
            code, result = checked(capsys, silent.address, wrong.address, "--prompts", "2")
            assert (code, result["rows"][0]["output"]) == (1, UNEXPLAINED) and "margin is unknown" in result["remarks"][
                0
            ]


def of_tokens(*pairs, likely=None):
    """Serve pieces of a text with their token ids. likely: log-probabilities of the next token."""

    def pieces(body):
        ends = accumulate(len(ids) for _, ids in pairs)
        found = [piece(text, ids, total=end) for (text, ids), end in zip(pairs, ends, strict=True)][
            : body["max_tokens"]
        ]
        found[-1]["choices"][0]["finish_reason"] = "stop"
        if "logprobs" in body:
            found[0]["choices"][0]["logprobs"] = {"tokens": [], "top_logprobs": [likely]}
        return found

    return completion_server(pieces)


def test_other_tokens_of_the_same_text_are_found(capsys):
    """Greedy decoding has one sequence of tokens; a server that splits a word otherwise is not lossless."""
    whole, split = [(" a", [1]), (" re", [2]), ("turn", [3])], [(" a", [1]), (" r", [4]), ("eturn", [5])]
    likely = {" re": -0.5, " r": -3.0}
    with of_tokens(*whole, likely=likely) as plain, of_tokens(*whole, ("", [0])) as same, of_tokens(*split) as other:
        assert checked(capsys, plain.address, same.address, "--prompts", "1")[0] == 0  # the stop token may be sent
        code, result = checked(capsys, plain.address, other.address, "--prompts", "1")
    assert code == 1
    row = result["rows"][0]
    assert (row["output"], row["parts at"], row["margin"]) == (DIFFERS, 1, 2.5)
    assert (row["reference"], row["server"]) == (" re", " r")
    _, *options, limits = result["remarks"]
    assert [option.partition(":")[0] for option in options] == ["vLLM", "SGLang"]
    assert "VLLM_BATCH_INVARIANT=1" in options[0] and "--enable-deterministic-inference" in options[1]
    assert "without penalties, logit bias" in limits


def test_the_same_tokens_are_identical_whatever_their_text(capsys):
    """One server holds half a character back, another sends U+FFFD, and a third sends several tokens at a time."""
    held = [(" a", [1]), ("", [2]), ("é", [3]), (" b", [4]), ("", [0])]
    halves = [(" a", [1]), ("\ufffd", [2]), ("\ufffd", [3]), (" b", [4])]
    together = [(" a", [1]), ("é b", [2, 3, 4, 0])]
    with of_tokens(*held) as plain, of_tokens(*halves) as other, of_tokens(*together) as drafting:
        for servers in ((plain, other), (other, plain), (plain, drafting), (drafting, plain)):
            code, result = checked(capsys, *(server.address for server in servers), "--prompts", "1")
            assert (code, result["rows"][0]["output"]) == (0, IDENTICAL)
            assert len(result["remarks"]) == 2  # no option where nothing differs
    changed = [*halves[:3], (" c", [5])]
    with of_tokens(*held, likely={" b": -0.5, " c": -3.0}) as plain, of_tokens(*changed) as wrong:
        row = checked(capsys, plain.address, wrong.address, "--prompts", "1")[1]["rows"][0]
    assert (row["output"], row["parts at"], row["margin"]) == (DIFFERS, 3, 2.5)
    assert (row["reference"], row["server"]) == (" b", " c")


def test_the_local_engine_is_a_reference(capsys):
    local = LocalSide("stories", "float32", "cpu")

    def pieces(body):
        answer = local.answer(body["prompt"], body["max_tokens"])
        return [*(piece(text) for text in answer.pieces), piece("", finish=answer.finish)]

    def changed(body):
        found = pieces(body)
        found[4] = piece(" zebra")
        return found

    options = ["--target", "stories", "--dtype", "float32", "--device", "cpu", "--prompts", "2", "--new-tokens", "12"]
    with completion_server(pieces) as right, completion_server(changed) as wrong:
        assert checked(capsys, right.address, *options)[0] == 0
        code, result = checked(capsys, wrong.address, *options)
    assert code == 1 and [row["parts at"] for row in result["rows"]] == [4, 4]
    assert all(row["margin"] > 0.3 for row in result["rows"]) and result["environment"]["dtype"] == "float32"


def test_refusals_are_one_line(capsys):
    assert main(["check-server", "http://127.0.0.1:9"]) == 2
    assert "add --target NAME" in capsys.readouterr().err
    assert main(["check-server", "a:1", "b:2", "c:3"]) == 2
    assert "one or two addresses, not 3" in capsys.readouterr().err
    assert main(["check-server", "http://127.0.0.1:9", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    with pytest.raises(ValueError, match="prompts must be"):
        ServerCheck.build({"server": "http://a", "prompts": MOST + 1})


def test_leading_space_is_ignored():
    assert GreedyAnswer.without_leading_space([" ", " a", " b"], "stop") == GreedyAnswer(["", "a", " b"], "stop", "  ")
    assert GreedyAnswer.without_leading_space(["a", " b"], "stop").pieces == ["a", " b"]


def test_the_answers_part_at_a_piece():
    first = GreedyAnswer(["One", " day", " she", " ran"], "length")
    assert common_pieces(first, GreedyAnswer(["One day", " he"], "length")) == 2
    assert common_pieces(first, GreedyAnswer(["One", " day", " shy"], "length")) == 2
    assert common_pieces(first, GreedyAnswer(["One day she"], "stop")) == 3
    assert common_pieces(GreedyAnswer(["One"], "stop"), first) == 0  # the end of a text has no piece of its own


@pytest.mark.parametrize(
    ("first", "second", "margin"),
    [
        (" she ran", " he ran", 1.0),
        (" she", " shy", 2.5),  # the longest token that fits
        (" she", " zebra", 5.0),  # less likely than all that are listed
        (" she", "", 4.0),  # the end of the answer
        (" zebra", " she", None),
        (" she", " sheep", None),  # the tokens that differ are not known
    ],
)
def test_margins(first, second, margin):
    tokens = {" she": -1.0, " he": -2.0, " sh": -3.5, "</s>": -5.0, " x": -6.0}
    assert margin_between(tokens, first, second) == margin
    assert margin_between({}, first, second) is None


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"), [(0, 20, 0.0, 0.1684), (1, 20, 0.0013, 0.2487), (20, 20, 0.8316, 1.0)]
)
def test_exact_interval_of_a_share(hits, count, low, high):  # R: binom.test
    assert share_interval(hits, count) == pytest.approx((low, high), abs=1e-4)
