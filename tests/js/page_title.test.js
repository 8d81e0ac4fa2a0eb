import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { pageTitle } = load(["page_title"], "pageTitle", { document: { title: "App" }, setInterval() {} });

test("the title names a run in progress, the speed-up of a race, and the tab", () => {
  assert.equal(pageTitle("Race", false, "No result yet"), "App");
  assert.equal(pageTitle("Race", true, "1.80×"), "Running… - App");
  assert.equal(pageTitle("Race", false, "1.80×"), "1.8× as fast - App");
  assert.equal(pageTitle("Race", false, "0.72×"), "0.7× as fast - App");
  assert.equal(pageTitle("Find what pays", true, "1.80×"), "Running… - Find what pays - App");
  assert.equal(pageTitle("Training", false, "1.80×"), "Training - App");
});
