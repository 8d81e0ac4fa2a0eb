// The display's clock. Lines are shown when it reaches their device time, so the pace of the display, and a replay, never
// touch the engine. Knows no DOM: whoever makes a player says how lines are shown.

const AUTO_MS = 4000; // pace "auto" stretches the faster lane to about so long, the slowest to three times that
const TOKEN_MS = 60; // but no token for longer than this
const AUTO_START = 1 / 8; // its speed until a lane has told how fast it is
const SLOWEST = 1 / 1000;

class Player {
  /**
   * @param {object} does
   * @param {() => number | "auto"} does.pace 1: as it comes; a half: at half speed
   * @param {(lane: Lane, lines: Line[]) => void} does.show the lines of a lane whose time has come
   * @param {(shown: number) => void} does.after after every look at the clock
   * @param {(lane: Lane) => void} [does.reset] nothing of the lane is on show any more
   * @param {(lane: Lane, line: Line, ms: number) => void} [does.begin] a step has begun that ends in so many milliseconds
   * @param {(draw: FrameRequestCallback) => number} [does.request]
   * @param {(frame: number) => void} [does.cancel]
   * @param {() => number} [does.now] milliseconds
   */
  constructor({ pace, show, after, reset = () => {}, begin = () => {}, request = (draw) => requestAnimationFrame(draw), cancel = (frame) => cancelAnimationFrame(frame), now = () => performance.now() }) {
    this.pace = pace;
    this.show = show;
    this.after = after;
    this.reset = reset;
    this.begin = begin;
    this.request = request;
    this.cancel = cancel;
    this.now = now;
    /** @type {Run} */
    this.run = null;
    this.replay = this.paused = this.hurried = false;
    this.clock = this.last = this.frame = 0;
  }

  /** Another run, from its start. Replayed lanes start together; sequential ones follow each other only the first time.
   * @param {Run} run @param {boolean} replay */
  load(run, replay) {
    this.stop();
    this.run = run;
    this.replay = replay;
    this.paused = this.hurried = false;
    this.clock = this.last = 0;
  }

  stop() {
    if (this.frame) this.cancel(this.frame);
    this.frame = 0;
  }

  /** @param {Lane} lane @param {Line} line */
  receive(lane, line) {
    const sequential = this.run.start.schedule === "sequential";
    lane.offset ??= sequential ? sum(this.run.lanes.map((other) => other.received)) : 0;
    if (line.type === "step") lane.received = line.so_far.clock_ms;
    else lane.over = true;
    line.at = lane.received;
    lane.lines.push(line);
  }

  get playing() {
    return this.frame !== 0;
  }

  /** Milliseconds of device time per millisecond of display. */
  get speed() {
    const asked = this.pace();
    if (asked !== "auto") return asked;
    const known = this.run.lanes.map((lane) => this.length(lane)).filter(isNumber);
    if (!known.length) return AUTO_START;
    const whole = Math.min(AUTO_MS, TOKEN_MS * (this.run.end ? this.tokens : this.run.start.limit || Infinity));
    return Math.max(SLOWEST, Math.min(1, Math.max(Math.min(...known) / whole, Math.max(...known) / (3 * whole))));
  }

  /** Of the longest text. */
  get tokens() {
    return Math.max(2, ...this.run.lanes.map((lane) => lane.lines.findLast((line) => line.so_far)?.so_far.tokens || 0));
  }

  /** Milliseconds of device time from a lane's first token to its last one, as far as it can be told by now.
   * @param {Lane} lane */
  length(lane) {
    const steps = lane.over ? lane.lines.slice(0, -1) : lane.lines;
    if (steps.length < 2) return null;
    const passed = lane.received - steps[0].at;
    const { tokens } = steps.at(-1).so_far;
    const limit = this.run.start.limit;
    return lane.over || !limit || !(tokens > 1) ? passed : (passed * (limit - 1)) / (tokens - 1);
  }

  /** Where the axis of the lanes' own device time ends: at the end of the last one, or where that is expected. */
  get span() {
    return Math.max(0, ...this.run.lanes.map((lane) => (lane.lines[0]?.at ?? 0) + (this.length(lane) ?? 0)));
  }

  /** A lane's own device time as it is shown, ms.
   * @param {Lane} lane */
  timeOf(lane) {
    const shown = lane.next ? lane.lines[lane.next - 1].at : 0;
    if (!this.frame && !this.paused) return shown;
    return Math.max(shown, Math.min(this.clock - (this.replay ? 0 : lane.offset || 0), lane.received));
  }

  get atOnce() {
    return !this.replay && (this.hurried || this.speed === 1);
  }

  get over() {
    return Boolean(this.run.end) && this.run.lanes.every((lane) => lane.next >= lane.lines.length);
  }

  play() {
    if (this.paused) return;
    if (this.atOnce || (this.run.recorded && !this.replay)) return this.advance(Infinity);
    if (!this.frame) this.start();
  }

  start() {
    this.paused = false;
    this.last = this.now();
    if (!this.clock && this.pace() === "auto") this.clock = this.firstToken();
    this.frame = this.request((now) => this.tick(now));
  }

  /** Nobody waits for a prefill at a tenth of its speed. */
  firstToken() {
    const begun = this.run.lanes.filter((lane) => lane.lines.length);
    return begun.length ? Math.min(...begun.map((lane) => this.due(lane, lane.lines[0]))) : 0;
  }

  pause() {
    this.stop();
    this.paused = true;
  }

  /** @param {number} now */
  tick(now) {
    const passed = Math.max(0, now - this.last);
    this.last = now;
    this.clock = Math.max(this.clock, Math.min(this.clock + passed * this.speed, this.horizon()));
    this.advance(this.atOnce ? Infinity : this.clock);
    this.frame = this.over || this.paused ? 0 : this.request((next) => this.tick(next));
  }

  /** @param {Lane} lane @param {Line} line */
  due(lane, line) {
    return line.at + (this.replay ? 0 : lane.offset);
  }

  /** How far the engine is known to have come: the display waits there and does not jump ahead afterwards. */
  horizon() {
    const open = this.run.lanes.filter((lane) => !lane.over);
    const reached = open.map((lane) => lane.received + (this.replay ? 0 : lane.offset || 0));
    if (this.run.end || !open.length) return Infinity;
    return this.run.start.schedule === "sequential" ? Math.max(...reached) : Math.min(...reached);
  }

  /** @param {number} clock */
  advance(clock) {
    let shown = 0;
    for (const lane of this.run.lanes) {
      const first = lane.next;
      while (lane.next < lane.lines.length && this.due(lane, lane.lines[lane.next]) <= clock) {
        this.clock = Math.max(this.clock, this.due(lane, lane.lines[lane.next])); // shown at once is behind the clock too
        lane.next += 1;
      }
      if (lane.next > first) this.show(lane, lane.lines.slice(first, lane.next));
      if (this.frame || clock !== Infinity) this.announce(lane);
      shown += lane.next - first;
    }
    this.after(shown);
  }

  /** Tells of the step that a lane is in, once.
   * @param {Lane} lane */
  announce(lane) {
    const line = lane.lines[lane.next];
    if (this.paused || !lane.next || line?.type !== "step" || lane.begun === line) return;
    lane.begun = line;
    this.begin(lane, line, (line.at - lane.lines[lane.next - 1].at) / this.speed);
  }

  /** Shows the run as it was at a time, and stays there.
   * @param {number} clock */
  seek(clock) {
    this.pause();
    if (this.run.end) this.replay = true;
    if (clock < this.clock || this.run.lanes.some((lane) => lane.next && this.due(lane, lane.lines[lane.next - 1]) > clock)) {
      for (const lane of this.run.lanes) {
        Object.assign(lane, { next: 0, begun: null });
        this.reset(lane);
      }
    }
    this.clock = clock;
    this.advance(clock);
  }

  /** The time at which a lane has shown so many steps more, or less; null where there is none.
   * @param {Lane} lane @param {number} by */
  stepTime(lane, by) {
    const steps = lane.lines.filter((line) => line.type === "step");
    const shown = Math.min(lane.next, steps.length) + by;
    return shown < 1 || shown > steps.length ? null : this.due(lane, steps[shown - 1]);
  }

  /** Everything that is left, now; of a run that goes on also what comes. */
  skip() {
    this.stop();
    this.paused = false;
    this.hurried = true;
    this.advance(Infinity);
  }
}
