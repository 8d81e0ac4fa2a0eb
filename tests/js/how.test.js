import assert from "node:assert/strict";
import { URL } from "node:url";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const read = (name) => readFileSync(new URL(`../../specdemo/ui/${name}`, import.meta.url), "utf8");

test("every button of the figures has a handler", () => {
  const buttons = [...read("how.html").matchAll(/data-action="([\w-]+)"/g)].map(([, action]) => action);
  const handlers = [...read("how.js").matchAll(/onAction\(box, "([\w-]+)"/g)].map(([, action]) => action);
  assert.deepEqual(buttons.sort(), handlers.sort());
});
