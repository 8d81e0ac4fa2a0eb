import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const document = { createElement: (tag) => ({ tag, dataset: {}, append() {} }) };
const { fullName, laneOptions, remoteLabel, rejectedDraft, CODE } = load(["helpers", "tree", "lanes"], "fullName, laneOptions, remoteLabel, rejectedDraft, CODE", { document });

test("a lane's header lists the options that were set, not the defaults", () => {
  const options = { k: 12, model: "stories", max_depth: 24, nodes: 0, remember: true };
  assert.equal(laneOptions({ index: 1, options, defaults: ["max_depth", "nodes"] }), "k = 12 · remember = true");
  assert.equal(laneOptions({ index: 1, options: { k: 4, nodes: 0 } }), "k = 4 · nodes = 0"); // an older trace has no defaults
  assert.equal(laneOptions({ index: 1, options: { k: 4, corpus: "def".repeat(1000) } }), "k = 4 · corpus = 3,000 characters");
  assert.equal(laneOptions({ index: 0, options: {} }), "one token per forward pass");
});

test("the full name of a lane is that of its method and its model", () => {
  const details = [["Method", "Adaptive length with Prompt lookup"], ["Model", "org/m"], ["Passes", "1 token 5 ms"]];
  assert.equal(fullName({ details }), "Adaptive length with Prompt lookup, org/m");
  assert.equal(fullName({ details: [], options: { model: "org/m" } }), "org/m"); // on a server
  assert.equal(fullName({}), ""); // before the first run
});

test("a lane on a server names the model that the server reports", () => {
  assert.equal(remoteLabel({ server: "a:1", model: "org/m" }), "remote: org/m at a:1, draft tokens unknown");
  assert.equal(remoteLabel({ server: "a:1", model: "" }), "remote: a:1, draft tokens unknown");
});

test("a rejected newline is one mark without the indentation after it, and further discarded tokens are counted", () => {
  const line = { drafted: ["\n        ", "self", "."], parents: [0, 1, 2], draft_outcomes: ["rejected", "not reached", "not reached"], path: [0] };
  const [node] = rejectedDraft(line, 3);
  assert.deepEqual([node.tag, node.textContent, node.dataset.outcome, node.dataset.more, node.dataset.step], ["del", "⏎", "rejected", "+2", 3]);
  assert.equal(rejectedDraft({ ...line, draft_outcomes: ["accepted", "accepted", "accepted"], path: [0, 1, 2, 3] }).length, 0);
});

test("a rejected special token leaves no mark", () => {
  const drawn = (text) => rejectedDraft({ drafted: [text], parents: [0], draft_outcomes: ["rejected"], path: [0] }, 0).length;
  for (const text of ["<|im_end|>", "<|endoftext|>", "</s>", "<end_of_turn>"]) assert.equal(drawn(text), 0, text);
  for (const text of ["<b>", " <|", "<", "||"]) assert.equal(drawn(text), 1, text);
});

test("a prompt that is code keeps its lines", () => {
  for (const code of ["def add(a, b):\n    return", "# Two numbers.\nclass Pair:\n", "import os\n"]) assert.match(code, CODE);
  for (const text of ["Once upon a time, a class of children (and a dog) ran.", "from the house to the river\nand back"]) assert.doesNotMatch(text, CODE);
});
