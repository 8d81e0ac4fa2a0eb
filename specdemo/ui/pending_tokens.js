// Animation of one step: the draft tokens appear, a sweep over all of them is the target's pass, each is accepted or struck through,
// then the target's token drops in. The caller draws the output text afterwards. Reduced motion: the same states without transitions.

const MIN_STEP_MS = 150; // shorter steps are drawn without animation, except at a slow speed
const SLOW_STEP_MS = 1100; // duration of a single step on request

/** Returns the draft tokens of a step to display, in order. Of a tree: the accepted path and the rejected token at its end. */
function displayedDrafts(line) {
  const all = line.draft_outcomes.map((outcome, i) => ({ text: line.drafted[i] ?? "", outcome, parent: line.parents[i], slot: i + 1 })).filter(({ outcome }) => outcome);
  if (!isTree(line)) return all;
  const end = line.path.at(-1);
  return all.filter(({ slot, parent, outcome }) => line.path.includes(slot) || (outcome === "rejected" && parent === end)).slice(0, line.path.length);
}

/** Returns whether to show the draft tokens of a step that takes `ms` milliseconds. A slow speed shows every step.
 * @param {number | "auto"} pace @param {number} ms */
const isShown = (pace, ms) => ms >= MIN_STEP_MS || (pace !== "auto" && pace < 1);

/** Returns when the phases of an animation of `ms` milliseconds start: the sweep, the outcomes and the target's token. */
function phases({ draft = 0, verify = 1 }, ms) {
  const share = Math.min(0.5, Math.max(0.2, draft / (draft + verify || 1)));
  return { sweep: 0.65 * share * ms, outcome: 0.65 * ms, target: 0.8 * ms };
}

/**
 * Returns the draft tokens of a step as a node with an animation of `ms` milliseconds.
 * @param {Line} line @param {number} ms
 */
function pendingTokens(line, ms) {
  const nodes = displayedDrafts(line);
  const { sweep, outcome: outcomeAt, target } = phases(line.ms, ms);
  const drafts = nodes.map(({ text, outcome }, i) => {
    const node = withData(make("samp", "sd-pending-token", text.replace(/\n/g, "⏎")), { outcome: outcome.replace(" ", "-") });
    const position = nodes.length > 1 ? i / (nodes.length - 1) : 0;
    return withTimes(node, { appear: (sweep * i) / nodes.length, sweep: sweep + ((outcomeAt - sweep) / 2) * position });
  });
  const last = line.output_outcomes.at(-1);
  const token = (last === "corrected" || last === "bonus") && withData(make("samp", "sd-pending-target", line.text.at(-1)), { outcome: last });
  const box = Object.assign(make("samp", "sd-pending", ...drafts, token), { ariaHidden: "true" });
  return withTimes(box, { pass: (outcomeAt - sweep) / 2, change: Math.min(160, ms / 8), outcome: outcomeAt, target });
}

/** Returns one sentence about the result of a step. */
function describeStep(line) {
  const quoted = (text) => `“${(text ?? "").trim() || visible(text ?? "")}”`;
  const [outcome, last] = [line.output_outcomes.at(-1), line.text.at(-1)];
  const accepted = line.output_outcomes.filter(isAccepted).length;
  const drafts = line.draft_outcomes.filter(Boolean).length;
  const yielded = `${line.output_outcomes.length} token${line.output_outcomes.length === 1 ? "" : "s"} from one pass`;
  const rejected = firstRejected(line);
  if (line.notes?.by_chance) return `Synthetic acceptance: ${accepted} of ${drafts} draft tokens accepted at random, ${yielded}.`;
  if (outcome === "bonus") return `All draft tokens${isTree(line) ? " on the path" : ""} were accepted, so the pass also gave the bonus token ${quoted(last)}: ${yielded}.`;
  if (outcome !== "corrected" || rejected < 0) return `${sentence(yielded)}.`;
  return `${accepted ? `${accepted} draft token${accepted === 1 ? "" : "s"} accepted; then the` : "The"} target chose ${quoted(last)} and not ${quoted(line.drafted[rejected])}: ${yielded}.`;
}
