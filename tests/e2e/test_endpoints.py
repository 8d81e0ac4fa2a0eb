"""The two API endpoints, called with gradio_client."""

import itertools
import json

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError


@pytest.fixture(scope="module")
def client(address):
    made = Client(address, verbose=False, analytics_enabled=False)
    yield made
    made.close()


def test_compare_returns_a_summary(client):
    result = client.predict("embedded-draft", {"max_new_tokens": 8, "k": 2}, api_name="/compare")
    assert [lane["summary"]["tokens"] for lane in result["lanes"]] == [8, 8]
    assert result["lanes"][0]["text"] == result["lanes"][1]["text"]
    assert result["comparison"][0]["verdict"] == "identical" and result["config"]["max_new_tokens"] == 8


def test_race_streams_lines(client):
    outputs = list(client.submit("embedded-draft", {"max_new_tokens": 8}, api_name="/race"))
    lines = [json.loads(line) for line in outputs[-1].splitlines()]
    assert all(after.startswith(before) for before, after in itertools.pairwise(outputs))
    assert {"run", "start", "step", "done", "end"} <= {line["type"] for line in lines}


def test_bad_input_is_one_line(client):
    with pytest.raises(AppError, match="k must be 16 or less, not 99"):
        client.predict("embedded-draft", {"k": 99}, api_name="/compare")
    with pytest.raises(AppError, match="did you mean"):
        client.predict("embeded-draft", None, api_name="/race")


def test_no_other_endpoint_is_public(client):
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/race", "/compare"}
