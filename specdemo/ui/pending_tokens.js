// Animation of one step: the draft tokens appear, a sweep over all of them is the target's pass, then each is accepted or struck
// through. The caller draws the output text afterwards.

const MIN_STEP_MS = 150; // shorter steps are drawn without animation
const SLOW_STEP_MS = 1100; // duration of a single step on request

/** Returns the draft tokens of a step to display, in order. Of a tree: the accepted path and the rejected token at its end. */
function displayedDrafts(line) {
  const all = line.fates.map((outcome, i) => ({ text: line.drafted[i] ?? "", outcome, parent: line.parents[i], slot: i + 1 })).filter(({ outcome }) => outcome);
  if (!isTree(line)) return all;
  const end = line.path.at(-1);
  return all.filter(({ slot, parent, outcome }) => line.path.includes(slot) || (outcome === "rejected" && parent === end)).slice(0, line.path.length);
}

/**
 * Returns the draft tokens of a step as a node with an animation of `ms` milliseconds.
 * @param {Line} line @param {number} ms
 */
function pendingTokens(line, ms) {
  const nodes = displayedDrafts(line);
  const { draft = 0, verify = 1 } = line.ms;
  const share = Math.min(0.6, Math.max(0.25, draft / (draft + verify)));
  const [drafting, passing] = [ms * share * 0.9, ms * (1 - share) * 0.75];
  const box = make("samp", "sd-pending");
  box.ariaHidden = "true";
  box.style.setProperty("--pass", `${passing / 2}ms`);
  nodes.forEach(({ text, outcome }, i) => {
    const node = make("samp", "sd-pending-token", text.replace(/\n/g, "⏎"));
    node.dataset.outcome = outcome.replace(" ", "-");
    const position = nodes.length > 1 ? i / (nodes.length - 1) : 0;
    node.style.setProperty("--appear", `${(drafting * i) / nodes.length}ms`);
    node.style.setProperty("--sweep", `${drafting + (passing / 2) * position}ms`);
    node.style.setProperty("--outcome", `${drafting + passing}ms`);
    box.append(node);
  });
  return box;
}

/** Returns one sentence about the result of a step. */
function describeStep(line) {
  const quoted = (text) => `“${(text ?? "").trim() || visible(text ?? "")}”`;
  const [targetKind, last] = [line.kinds.at(-1), line.text.at(-1)];
  const accepted = line.kinds.filter((kind) => kind === "accepted").length;
  const drafts = line.fates.filter(Boolean).length;
  const yielded = `${line.kinds.length} token${line.kinds.length === 1 ? "" : "s"} from one pass`;
  const rejected = line.fates.findIndex((outcome, i) => outcome === "rejected" && line.parents[i] === line.path.at(-1));
  if (line.notes?.by_chance) return `Synthetic acceptance: ${accepted} of ${drafts} draft tokens accepted at random, ${yielded}.`;
  if (targetKind === "bonus") return `All draft tokens${isTree(line) ? " on the path" : ""} were accepted, so the pass also gave the bonus token ${quoted(last)}: ${yielded}.`;
  if (targetKind !== "corrected" || rejected < 0) return `${sentence(yielded)}.`;
  return `${accepted ? `${accepted} draft token${accepted === 1 ? "" : "s"} accepted; then the` : "The"} target chose ${quoted(last)} and not ${quoted(line.drafted[rejected])}: ${yielded}.`;
}
