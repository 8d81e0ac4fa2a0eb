// The arithmetic behind the figures of "How it works"; no DOM.

/** Tokens one pass yields on average when each of k drafts is kept with chance `alpha` (Leviathan et al. 2023, eq. 1). */
const expectedTokens = (alpha, k) => (alpha >= 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Times as fast as plain decoding. draft: cost of drafting one token, wide: of the target's pass over k + 1, in plain passes. */
const speedUp = ({ alpha, k, draft, wide }) => expectedTokens(alpha, k) / (k * draft + wide);

/** The chance of keeping a draft that yields so many tokens a pass. */
function acceptanceOf(tokens, k) {
  let [low, high] = [0, 1];
  for (let i = 0; i < 40; i += 1) {
    const middle = (low + high) / 2;
    if (expectedTokens(middle, k) < tokens) low = middle;
    else high = middle;
  }
  return low;
}

/** What is left of p once q is taken away, as a distribution; p itself where nothing is left. */
function residual(p, q) {
  const left = p.map((x, i) => Math.max(0, x - q[i]));
  const total = sum(left);
  return total > 1e-12 ? left.map((x) => x / total) : p;
}

/** An index drawn from a distribution by a number from 0 to 1. */
function drawn(weights, at) {
  let rest = at * sum(weights);
  const found = weights.findIndex((weight) => (rest -= weight) < 0);
  return found < 0 ? weights.findLastIndex((weight) => weight > 0) : found;
}

/** One token by speculative sampling: drafted from q, kept with chance min(1, p / q), else drawn from the residual. */
function speculate(p, q, random) {
  const draft = drawn(q, random());
  const kept = random() * q[draft] < p[draft];
  return { draft, kept, token: kept ? draft : drawn(residual(p, q), random()) };
}

/** The distribution with one value set; the others keep their proportions. */
function withValue(weights, i, value) {
  const rest = 1 - weights[i];
  const set = Math.min(0.97, Math.max(0.01, value));
  return weights.map((weight, j) => (j === i ? set : rest > 1e-9 ? (weight * (1 - set)) / rest : (1 - set) / (weights.length - 1)));
}

/** The cost of a pass over n tokens, in passes over one: reading the weights is paid once, arithmetic by the token.
 * balance: at so many tokens arithmetic takes as long as reading. */
const passCost = (n, balance) => (balance + n) / (balance + 1);

/** Speed-up of a batch of b texts. draft: cost of a drafted token in plain passes of one text. */
function batchSpeedUp({ alpha, k, draft, balance }, b) {
  const plain = passCost(b, balance);
  return (expectedTokens(alpha, k) * plain) / (k * draft * plain + passCost(b * (k + 1), balance));
}
