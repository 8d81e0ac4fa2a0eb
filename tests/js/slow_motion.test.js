import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { exampleStep, moments } = load(["helpers", "tree", "pending_tokens", "slow_motion"], "exampleStep, moments");

const prefill = { draft_outcomes: [], output_outcomes: ["target"] };
const plainStep = { output_outcomes: ["target"] };
const allAccepted = { draft_outcomes: ["accepted", "accepted"], output_outcomes: ["accepted", "accepted", "bonus"] };
const noneAccepted = { draft_outcomes: ["rejected", "not reached"], output_outcomes: ["corrected"] };
const someAccepted = { draft_outcomes: ["accepted", "rejected"], output_outcomes: ["accepted", "corrected"] };

test("the example is an early step that accepts and rejects, else one that rejects, else the first that drafts", () => {
  const chosen = (...lines) => exampleStep([prefill, ...lines]);
  assert.equal(chosen(allAccepted, noneAccepted, someAccepted, someAccepted), 3);
  assert.equal(chosen(allAccepted, noneAccepted, noneAccepted), 2);
  assert.equal(chosen(plainStep, allAccepted, allAccepted), 2);
  assert.equal(chosen(plainStep, plainStep), -1);
  assert.equal(chosen(), -1);
  assert.equal(chosen(allAccepted, ...Array(20).fill(plainStep), someAccepted), 1); // not early
  assert.equal(exampleStep([prefill, someAccepted, plainStep, allAccepted], 2), 3); // what was shown is over
});

test("draft tokens, the pass, the checks from left to right and the target's token follow one another", () => {
  for (const [drafted, checked] of [[1, 1], [4, 2], [8, 8], [16, 16], [3, 0]]) {
    const { appear, pass, checks, target, end, stills } = plain(moments(drafted, checked));
    const times = [...appear, pass, ...checks, target, end];
    assert.deepEqual(times, times.toSorted((a, b) => a - b));
    assert.deepEqual([appear.length, checks.length, stills.length], [drafted, checked, 4]);
    assert.ok(appear.at(-1) < stills[0] && stills[0] < pass && pass < stills[1] && stills[1] < (checks[0] ?? target));
    assert.ok((checks.at(-1) ?? 0) < stills[2] && stills[2] < target && target < stills[3] && stills[3] < end && end < 7000);
  }
});
