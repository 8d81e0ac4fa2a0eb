// A step as it happens: the drafted tokens appear as ghosts, one sweep over all of them is the target's pass, then each is
// kept or struck. What follows, the text itself, is drawn by whoever called.

const SHOWN_MS = 150; // a step that is over sooner is drawn at once
const TOLD_MS = 1100; // how long a step takes that someone asked to see

/** What is tried in a step, in order: of a tree the path that was kept and the draft that was refused at its end. */
function tried(line) {
  const all = line.fates.map((fate, i) => ({ text: line.drafted[i] ?? "", fate, parent: line.parents[i], slot: i + 1 })).filter(({ fate }) => fate);
  if (!isTree(line)) return all;
  const end = line.path.at(-1);
  return all.filter(({ slot, parent, fate }) => line.path.includes(slot) || (fate === "rejected" && parent === end)).slice(0, line.path.length);
}

/**
 * The ghosts of a step as a node whose animation takes so many milliseconds.
 * @param {Line} line @param {number} ms
 */
function ghosts(line, ms) {
  const nodes = tried(line);
  const { draft = 0, verify = 1 } = line.ms;
  const share = Math.min(0.6, Math.max(0.25, draft / (draft + verify)));
  const [drafting, passing] = [ms * share * 0.9, ms * (1 - share) * 0.75];
  const box = make("samp", "sd-ghosts");
  box.ariaHidden = "true";
  box.style.setProperty("--pass", `${passing / 2}ms`);
  nodes.forEach(({ text, fate }, i) => {
    const node = make("samp", "sd-ghost", text.replace(/\n/g, "⏎"));
    node.dataset.fate = fate.replace(" ", "-");
    const along = nodes.length > 1 ? i / (nodes.length - 1) : 0;
    node.style.setProperty("--appear", `${(drafting * i) / nodes.length}ms`);
    node.style.setProperty("--sweep", `${drafting + (passing / 2) * along}ms`);
    node.style.setProperty("--verdict", `${drafting + passing}ms`);
    box.append(node);
  });
  return box;
}

/** What happened in a step, as one would say it. */
function verdictWords(line) {
  const quoted = (text) => `“${(text ?? "").trim() || visible(text ?? "")}”`;
  const [own, last] = [line.kinds.at(-1), line.text.at(-1)];
  const kept = line.kinds.filter((kind) => kind === "accepted").length;
  const drafts = line.fates.filter(Boolean).length;
  const gained = `${line.kinds.length} token${line.kinds.length === 1 ? "" : "s"} from one pass`;
  const wrong = line.fates.findIndex((fate, i) => fate === "rejected" && line.parents[i] === line.path.at(-1));
  if (line.notes?.by_chance) return `By chance, whatever the target says, ${kept} of ${drafts} guesses kept: ${gained}.`;
  if (own === "bonus") return `Every guess${isTree(line) ? " on the path" : ""} was right, so the pass gave ${quoted(last)} for free: ${gained}.`;
  if (own !== "corrected" || wrong < 0) return `${sentence(gained)}.`;
  return `${kept ? `${kept} guess${kept === 1 ? "" : "es"} right; then the` : "The"} target said ${quoted(last)} and not ${quoted(line.drafted[wrong])}: ${gained}.`;
}
