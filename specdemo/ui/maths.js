// Formulas of the figures of "How it works". Independent of the DOM.

/** Returns the mean accepted length of k draft tokens with acceptance rate `alpha` (Leviathan et al. 2023, eq. 1). */
const expectedTokens = (alpha, k) => (alpha >= 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Returns the speed-up over plain decoding. draft: cost of a draft token; verify: cost of the pass over k + 1 tokens; both in plain passes. */
const speedUp = ({ alpha, k, draft, verify }) => expectedTokens(alpha, k) / (k * draft + verify);

/** Returns the acceptance rate that gives a mean accepted length of `tokens`. */
function acceptanceOf(tokens, k) {
  let [low, high] = [0, 1];
  for (let i = 0; i < 40; i += 1) {
    const middle = (low + high) / 2;
    if (expectedTokens(middle, k) < tokens) low = middle;
    else high = middle;
  }
  return low;
}

/** Returns the residual distribution, the normalised max(0, p - q); p if the residual is zero. */
function residual(p, q) {
  const excess = p.map((x, i) => Math.max(0, x - q[i]));
  const total = sum(excess);
  return total > 1e-12 ? excess.map((x) => x / total) : p;
}

/** An index drawn from a distribution by a number from 0 to 1. */
function sample(weights, at) {
  let rest = at * sum(weights);
  const index = weights.findIndex((weight) => (rest -= weight) < 0);
  return index < 0 ? weights.findLastIndex((weight) => weight > 0) : index;
}

/** Samples a token speculatively: draft from q, accept with probability min(1, p / q), else resample from the residual. */
function speculate(p, q, random) {
  const draft = sample(q, random());
  const accepted = random() * q[draft] < p[draft];
  return { draft, accepted, token: accepted ? draft : sample(residual(p, q), random()) };
}

/** Returns the distribution with one value changed; the others keep their proportions. */
function withValue(weights, i, value) {
  const rest = 1 - weights[i];
  const set = Math.min(0.97, Math.max(0.01, value));
  return weights.map((weight, j) => (j === i ? set : rest > 1e-9 ? (weight * (1 - set)) / rest : (1 - set) / (weights.length - 1)));
}

/** Returns the cost of a pass over n tokens, in passes over one token. Reading the weights costs the same for any n.
 * ridge: number of tokens at which arithmetic takes as long as reading the weights. */
const passCost = (n, ridge) => (ridge + n) / (ridge + 1);

/** Returns the speed-up at batch size b. draft: cost of a draft token, in plain passes at the same batch size. */
function batchSpeedUp({ alpha, k, draft, ridge }, b) {
  const plain = passCost(b, ridge);
  return (expectedTokens(alpha, k) * plain) / (k * draft * plain + passCost(b * (k + 1), ridge));
}
