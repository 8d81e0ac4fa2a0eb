// The draft tree of one step: depth from left to right, siblings from top to bottom in the order of verification. The target's
// token continues the accepted path, so it is listed before the rejected siblings.

const OUTCOME_LABELS = { accepted: "✓ accepted", forced: "» forced by the grammar", rejected: "✗ rejected", "not reached": "· not reached" };
const TARGET_TOKEN_LABELS = { corrected: "↺ correction token", bonus: "★ bonus token", target: "target token, nothing drafted", unknown: "? unknown: not reported by the server" };

const SMALL_TREE = 20; // up to this many nodes, each node shows q and p
const COLUMN = { width: 132, node: 112 };
const NODE_HEIGHT = { small: 42, large: 25 };
const ROW_GAP = 7;
const OUTPUT_OUTCOMES = ["root", "accepted", "forced", "corrected", "bonus"];
const SIGNS = { root: "○", accepted: "✓", forced: "»", rejected: "✗", "not reached": "·", corrected: "↺", bonus: "★" };

const isAccepted = (outcome) => outcome === "accepted" || outcome === "forced";

// Returns the index of the rejected draft token at the end of the path, which the target corrects; -1 if there is none.
const firstRejected = (line) => line.draft_outcomes.findIndex((outcome, i) => outcome === "rejected" && line.parents[i] === line.path.at(-1));

const isTree = (line) => line.draft_outcomes.some((outcome, i) => outcome && line.parents[i] !== i);

// Returns the nodes in reading order, each with depth, row, parent and children.
function layOut(line, root) {
  const first = { text: root, outcome: "root", children: [], parent: null };
  const slots = [first];
  const attach = (node, parent) => {
    parent.children.push(Object.assign(node, { parent, children: [], rank: parent.children.length + 1 }));
    return node;
  };
  line.draft_outcomes.forEach((outcome, i) => {
    const parent = outcome && slots[line.parents[i]];
    const p = outcome === "not reached" ? null : line.target_probs[i];
    slots.push(parent && attach({ text: line.drafted[i], outcome, q: line.draft_probs[i], p }, parent));
  });
  const [last, end] = [line.output_outcomes.at(-1), slots[line.path.at(-1)]];
  if (!isAccepted(last)) {
    attach({ text: line.text.at(-1), outcome: last }, end);
    end.children.unshift(end.children.pop());
  }
  const ordered = [];
  let row = 0;
  const place = (node, depth) => {
    ordered.push(Object.assign(node, { depth, row }));
    node.children.forEach((child, i) => {
      if (i) row += 1;
      place(child, depth + 1);
    });
  };
  place(first, 0);
  return ordered;
}

function treeView(line, root) {
  const nodes = layOut(line, root);
  const small = nodes.length <= SMALL_TREE;
  const tall = small ? NODE_HEIGHT.small : NODE_HEIGHT.large;
  const [left, top] = [(node) => node.depth * COLUMN.width, (node) => node.row * (tall + ROW_GAP)];
  const size = { width: Math.max(...nodes.map(left)) + COLUMN.node, height: Math.max(...nodes.map(top)) + tall };
  const words = make("p", "sd-small sd-node-label", "Thick line: accepted path. ✗ rejected, · not reached. Point at a node, or focus the tree and press the arrow keys.");
  for (const node of nodes) {
    node.view = nodeView(node, small, words);
    Object.assign(node.view.style, { left: `${left(node)}px`, top: `${top(node)}px`, height: `${tall}px` });
  }
  const canvas = make("div", "sd-canvas", edges(nodes, size, left, (node) => top(node) + tall / 2), ...nodes.map(({ view }) => view));
  Object.assign(canvas, { role: "presentation", style: `width: ${size.width}px; height: ${size.height}px` });
  const box = Object.assign(make("div", "sd-tree", canvas), { role: "tree", ariaLabel: `Draft tree: ${nodes.length} nodes` });
  box.addEventListener("keydown", (event) => moveFocusInTree(event, nodes));
  const end = nodes.filter((node) => OUTPUT_OUTCOMES.includes(node.outcome)).at(-1);
  end.view.tabIndex = 0;
  return { panel: make("div", "", box, words), show: () => scrollToCenter(box, end.view) };
}

function edges(nodes, { width, height }, left, middle) {
  const picture = svg("svg", { width, height, "aria-hidden": "true" });
  const order = [...nodes.slice(1)].sort((a, b) => Number(OUTPUT_OUTCOMES.includes(a.outcome)) - Number(OUTPUT_OUTCOMES.includes(b.outcome))); // the path on top
  for (const node of order) {
    const [x1, x2] = [left(node.parent) + COLUMN.node, left(node)];
    const [y1, y2] = [middle(node.parent), middle(node)];
    const bend = (x1 + x2) / 2;
    const d = `M${x1},${y1} L${bend},${y1} L${bend},${y2} L${x2},${y2}`;
    picture.append(svg("path", { d, "data-outcome": node.outcome.replace(" ", "-") }));
  }
  return picture;
}

function nodeView(node, small, words) {
  const siblings = node.parent ? node.parent.children : [node];
  const sign = Object.assign(make("span", "sd-outcome-sign", SIGNS[node.outcome]), { ariaHidden: "true" });
  const rank = "q" in node && siblings.length > 1 && make("i", "sd-rank", `#${node.rank}`);
  const numbers = "q" in node ? `q ${fixed(node.q, 2)}${isNumber(node.p) ? `  p ${fixed(node.p, 2)}` : ""}` : node.outcome;
  const view = make("div", "sd-node", make("span", "sd-node-name", sign, make("code", "", visible(node.text ?? "")), rank), small && make("small", "", numbers));
  const place = { ariaLevel: node.depth + 1, ariaSetSize: siblings.length, ariaPosInSet: siblings.indexOf(node) + 1 };
  Object.assign(withData(view, { outcome: node.outcome.replace(" ", "-") }), { tabIndex: -1, role: "treeitem", ariaLabel: nodeWords(node), ...place });
  for (const event of ["focus", "pointerenter"]) view.addEventListener(event, () => (words.textContent = nodeWords(node)));
  return view;
}

function nodeWords(node) {
  const token = `“${visible(node.text ?? "")}”`;
  if (node.outcome === "root") return `${token} · root, the last token before this step`;
  const verdict = OUTCOME_LABELS[node.outcome] || TARGET_TOKEN_LABELS[node.outcome];
  const known = [["draft q", node.q], ["target p", node.p]].filter(([, value]) => isNumber(value));
  const numbers = known.map(([name, value]) => `${name} ${fixed(value, 2)}`);
  const rank = "q" in node ? [`rank ${node.rank} of ${node.parent.children.filter((other) => "q" in other).length}`] : [];
  return [token, ...rank, `depth ${node.depth}`, ...numbers, verdict].join(" · ");
}

// Arrow keys: right to the first child, left to the parent, up and down in reading order.
function moveFocusInTree(event, nodes) {
  const now = nodes.findIndex((node) => node.view === event.target);
  if (now < 0) return;
  const to = {
    ArrowRight: nodes[now].children[0],
    ArrowLeft: nodes[now].parent,
    ArrowDown: nodes[now + 1],
    ArrowUp: nodes[now - 1],
    Home: nodes[0],
    End: nodes.at(-1),
  };
  if (!(event.key in to)) return;
  event.preventDefault();
  if (!to[event.key]) return;
  nodes[now].view.tabIndex = -1;
  to[event.key].view.tabIndex = 0;
  to[event.key].view.focus();
}

function scrollToCenter(box, node) {
  box.scrollTop = node.offsetTop - (box.clientHeight - node.offsetHeight) / 2;
  box.scrollLeft = node.offsetLeft - (box.clientWidth - node.offsetWidth) / 2;
}
