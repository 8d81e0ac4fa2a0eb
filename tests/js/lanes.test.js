import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { how, remoteWords } = load(["kit", "lanes"], "how, remoteWords", {});

test("a lane's header says what was set, and no default", () => {
  const options = { k: 12, model: "stories", max_depth: 24, nodes: 0, remember: true };
  assert.equal(how({ index: 1, options, defaults: ["max_depth", "nodes"] }), "k = 12 · remember = true");
  assert.equal(how({ index: 1, options: { k: 4, nodes: 0 } }), "k = 4 · nodes = 0"); // an older trace does not tell
  assert.equal(how({ index: 0, options: {} }), "one token per target pass");
});

test("a lane on a server names the model that the server reports", () => {
  assert.equal(remoteWords({ server: "a:1", model: "org/m" }), "remote: org/m at a:1, what was drafted is unknown");
  assert.equal(remoteWords({ server: "a:1", model: "" }), "remote: a:1, what was drafted is unknown");
});
