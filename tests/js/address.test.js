import { test } from "node:test";
import { equal } from "node:assert/strict";
import { load } from "./load.js";

const { settingsOf, searchOf } = load(["address"], "settingsOf, searchOf");

test("settings of an address exclude Gradio's own parameters", () => {
  equal(settingsOf("?preset=a&__theme=dark&k=7&view=api"), "preset=a&k=7");
  equal(settingsOf("?__theme=dark"), "");
  equal(settingsOf(""), "");
});

test("new settings keep Gradio's own parameters", () => {
  equal(searchOf("preset=b", "?preset=a&k=7&__theme=dark"), "?preset=b&__theme=dark");
  equal(searchOf("", "?preset=a"), "");
  equal(searchOf("preset=b&prompt=a%26b", ""), "?preset=b&prompt=a%26b");
});
